"""A zip archive of a model's tokenizer files, for other programs to load."""

from __future__ import annotations

import io
import json
import zipfile

from outrider.gateway.tokenizer.model import ModelTokenizer


def zipped(tokenizer: ModelTokenizer) -> bytes:
    """tokenizer.json, tokenizer_config.json with the chat templates, and generation_config.json with the EOS tokens."""
    templates = tokenizer.template.sources
    template = (
        templates.get("default")
        if len(templates) < 2
        else [{"name": name, "template": text} for name, text in templates.items()]
    )
    files = {
        "tokenizer.json": tokenizer.tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.template.variables}
            | ({"chat_template": template} if template else {})
        ),
        "generation_config.json": json.dumps({"eos_token_id": list(tokenizer.eos_token_ids)}),
    }
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, text in files.items():
            # A fixed date, so that equal files have equal hashes.
            packed.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), text, zipfile.ZIP_DEFLATED)
    return archive.getvalue()
