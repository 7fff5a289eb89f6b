"""gRPC plumbing shared by every process: servers, channels, errors, conversion. Knows no process's business."""
