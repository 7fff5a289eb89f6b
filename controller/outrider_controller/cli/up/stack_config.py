"""What a stack on one machine consists of, on which cores its processes run, and their command lines. Pure."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from outrider.configuration import Option
from outrider.model_names import served_name

from outrider_controller.cli.models import DEFAULT_TARGET, OUR_ENGINE, default_draft
from outrider_controller.cli.up.ports import Ports
from outrider_controller.cli.up.process import ProcessSpec


@dataclass(frozen=True, slots=True)
class Cores:
    """Empty tuples mean: wherever the system puts it."""

    targets: tuple[tuple[int, ...], ...]
    drafts: tuple[tuple[int, ...], ...]
    rest: tuple[int, ...]
    threads: int
    """Of one worker's engine."""

    def without(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """Those that no target has and that are not among these."""
        return tuple(sorted({core for one in (*self.drafts, self.rest) for core in one} - set(own)))


def shared(available: Sequence[int], targets: int, drafts: int) -> Cores:
    """No pinning; each worker computes with its share of the cores."""
    threads = max(1, len(available) // max(1, targets + drafts))
    return Cores(((),) * targets, ((),) * drafts, (), threads)


def pinned(available: Sequence[int], targets: int, drafts: int) -> Cores:
    """One core to each worker. What is neither runs on the cores left over, or beside the drafts when none are.

    With fewer cores than workers the targets share the first, and all else shares the others: what a target waits
    for must not stand behind the target's own next step.
    """
    cores = sorted(available)
    if len(cores) < targets + drafts:
        own, others = tuple(cores[:1]), tuple(cores[1:] or cores)
        return Cores((own,) * targets, (others,) * drafts, others, 1)
    own_each = tuple((core,) for core in cores[:targets])
    draft_each = tuple((core,) for core in cores[targets : targets + drafts])
    left = tuple(cores[targets + drafts :])
    of_drafts = tuple(core for one in draft_each for core in one)
    return Cores(own_each, draft_each, left or of_drafts or own_each[-1], 1)


ENGINES = (OUR_ENGINE, "vllm")
_HOST = "127.0.0.1"
_FIRST_ENDED, _THEN_ENDED = 1000, 300
"""Where memory is short: without a draft answers are only slower; a target's move to another one or wait. Router,
control plane, gateway and Redis take all requests with them, and are small."""
_OF_THE_STACK = ("--model", "--model-name", "--listen", "--ops-listen", "--metadata", "--cluster-secret-file")
"""What the stack tells a worker, and nobody else."""


@dataclass(frozen=True, slots=True)
class StackConfig:
    """One machine's stack. Ports of 0 are chosen."""

    target_model: str = DEFAULT_TARGET
    """What answers: a name or a path."""
    draft_model: str = ""
    """What drafts: a name or a path; default: the one shipped for the target."""
    targets: int = 1
    """Target workers."""
    engine: str = OUR_ENGINE
    """What runs the targets' model."""
    vllm_python: str = ""
    """With engine vllm: the interpreter of the environment that has it; default: this one."""
    tensor_parallel: int = 1
    """With engine vllm: processes of each target that divide the model among themselves."""
    drafts: int = 1
    """Draft workers; default: where drafts ship for the target, what is fastest on this machine (a draft worker, or a
    head in the target), measured once; 1 where a draft is given; else 0."""
    measured: bool = False
    """Draft workers and heads are those that are fastest for this target on this machine."""
    target_args: str = ""
    """Further options of `outrider target`, in quotes; each worker checks its own."""
    draft_args: str = ""
    """Further options of `outrider draft`, in quotes."""
    routers: int = 1
    """Router actors."""
    pin: bool = False
    """One CPU core to each worker; all else beside the drafts if no core is left."""
    borrow_cores: bool = False
    """Targets read prompts on all others' cores too: faster, but not as on machines of their own."""
    realtime: bool = False
    """Drafts and routers go before all else on their cores, as on machines of their own, where the system permits."""
    trace_tokens: bool = False
    """Routers keep the tokens of answers for `outrider trace`."""
    metadata_url: Annotated[str, Option("metadata")] = ""
    """URL of a Redis; default: one of the stack's own."""
    http_port: int = 0
    grpc_port: int = 0
    control_port: int = 0
    run_dir: Path | None = None
    """For logs; default: a new one in ~/.cache/outrider/run."""
    secret_file: Path | None = None
    """Of the cluster's secret: with one, routers, workers and control plane ask callers who they are."""
    receipt_key_file: Path | None = None
    """Of the key that signs receipts; not given: the gateway makes one."""
    state_dir: Path | None = None
    """Where the stack keeps over a restart that keys are required, and its own Redis tenants, keys and bills; not
    given: nowhere."""
    start_timeout_s: float = 300.0
    """Longest wait in seconds for a process to be ready."""
    stop_timeout_s: float = 20.0
    """After SIGTERM, before SIGKILL; for each tier of processes."""

    def __post_init__(self) -> None:
        for name in ("targets", "tensor_parallel", "routers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1")
        if self.engine not in ENGINES:
            raise ValueError(f"engine: {self.engine!r} is not one of {', '.join(ENGINES)}")
        if self.engine != "vllm":
            for name, unset in (("vllm_python", ""), ("tensor_parallel", 1)):
                if getattr(self, name) != unset:
                    raise ValueError(f"{name}: needs engine vllm")
        if self.drafts < 0:
            raise ValueError("drafts: must not be negative")
        for name in ("target_args", "draft_args"):
            _check_args(name, getattr(self, name))
        if not (self.start_timeout_s > 0 and self.stop_timeout_s >= 0):
            raise ValueError("start_timeout_s: must be above 0; stop_timeout_s: must not be negative")

    @property
    def model(self) -> str:
        """Name under which clients ask for the target."""
        return served_name(self.target_model)

    @property
    def draft(self) -> str:
        return self.draft_model or default_draft(self.target_model)

    @property
    def draft_engine(self) -> str:
        """The engine that runs the draft model: of a head's it is the target's."""
        words = shlex.split(self.draft_args)
        return self.engine if any(word.split("=")[0] == "--head" for word in words) else OUR_ENGINE

    @property
    def heads(self) -> set[str]:
        """Draft heads that the workers' further options name."""
        words = [part for word in shlex.split(f"{self.target_args} {self.draft_args}") for part in word.split("=", 1)]
        return {name for flag, name in pairwise(words) if flag in ("--head", "--remote-head")}


def _check_args(name: str, args: str) -> None:
    """Raises ValueError for what is no list of words, or changes how the stack reaches its worker."""
    try:
        words = shlex.split(args)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if taken := [flag for word in words if (flag := word.partition("=")[0]) in _OF_THE_STACK]:
        raise ValueError(f"{name}: {taken[0]} is set by the stack")


@dataclass(frozen=True, slots=True)
class StackPlan:
    """Every process but Redis, in the order in which requests depend on them: later ones stop first."""

    targets: tuple[ProcessSpec, ...]
    drafts: tuple[ProcessSpec, ...]
    controller: ProcessSpec
    gateway: ProcessSpec
    routers: tuple[str, ...]
    """Addresses of the routers, which live inside Ray."""
    ops: Mapping[str, str]
    """Address of every process's ops port, by its name; routers and control plane as `router-0` and `control`."""
    others: tuple[ProcessSpec, ...] = ()
    """Up to who amends a plan; they start first."""

    @property
    def tiers(self) -> tuple[tuple[ProcessSpec, ...], ...]:
        return (*self.others, *self.targets, *self.drafts), (self.controller,), (self.gateway,)


class StackPlanner:
    """Turns a config into command lines."""

    def __init__(self, config: StackConfig, target_path: Path, metadata_url: str, available: Sequence[int]) -> None:
        self._config = config
        self._target_path = target_path
        # It may hold a password, which a command line would show.
        self._env = {"OUTRIDER_METADATA": metadata_url}
        self._num_cores = len(available)
        assign = pinned if config.pin else shared
        self.cores: Cores = assign(available, config.targets, config.drafts)
        self._ops: dict[str, str] = {}

    def plan(self, ports: Ports) -> StackPlan:
        """Raises OSError when a port that was asked for is in use."""
        config = self._config
        grpc_port, http_port = ports.claim(config.grpc_port), ports.claim(config.http_port)
        control = f"{_HOST}:{ports.claim(config.control_port)}"
        routers = tuple(f"{_HOST}:{ports.claim()}" for _ in range(config.routers))
        worker_ports = [ports.claim() for _ in range(config.targets + config.drafts)]
        target_ports, draft_ports = worker_ports[: config.targets], worker_ports[config.targets :]
        self._ops = {name: f"{_HOST}:{ports.claim()}" for name in _names(config)}
        return StackPlan(
            targets=tuple(self._target(number, port) for number, port in enumerate(target_ports)),
            drafts=tuple(self._draft(number, port) for number, port in enumerate(draft_ports)),
            controller=self._controller(control, routers),
            gateway=self._gateway(f"{_HOST}:{grpc_port}", f"{_HOST}:{http_port}"),
            routers=routers,
            ops=self._ops,
        )

    def _target(self, number: int, port: int) -> ProcessSpec:
        name = ("--model", str(self._target_path), "--model-name", self._config.model)
        threads = max(1, self.cores.threads // self._config.tensor_parallel)
        flags = (*name, *self._worker(port, threads))
        own, more = self.cores.targets[number], tuple(shlex.split(self._config.target_args))
        if self._config.engine == "vllm":
            flags += ("--engine", "vllm", "--tensor-parallel", str(self._config.tensor_parallel), *more)
            return self._spec(f"target-{number}", "outrider.target", flags, port, own, self._config.vllm_python)
        if self._config.borrow_cores:
            others = self.cores.without(own)
            flags += ("--prefill-threads", str(threads + len(others) if own else self._num_cores))
        else:
            # For what no step waits for.
            others = tuple(core for core in self.cores.rest if core not in own)
        flags += ("--cpu-cores", ",".join(map(str, own)), *more)
        return self._spec(f"target-{number}", "outrider.target", flags, port, (*own, *others))

    def _draft(self, number: int, port: int) -> ProcessSpec:
        config = self._config
        path = str(self._target_path) if config.draft == config.target_model else config.draft
        name = ("--model", path, "--model-name", served_name(config.draft))
        flags = (*name, *self._worker(port, self.cores.threads), *shlex.split(config.draft_args))
        return self._spec(f"draft-{number}", "outrider.draft", flags, port, self.cores.drafts[number])

    def _worker(self, port: int, threads: int) -> tuple[str, ...]:
        drain = ("--drain-timeout", f"{self._config.stop_timeout_s / 2:g}")
        return ("--listen", f"{_HOST}:{port}", "--threads", str(threads), *drain, *self._secret)

    def _spec(
        self, name: str, module: str, flags: tuple[str, ...], port: int, cores: tuple[int, ...], python: str = ""
    ) -> ProcessSpec:
        argv = (python or sys.executable, "-m", module, *flags, "--ops-listen", self._ops[name])
        sooner = _FIRST_ENDED if module == "outrider.draft" else _THEN_ENDED
        return ProcessSpec(name, argv, f"{_HOST}:{port}", {"ops": self._ops[name]}, cores, self._env, sooner=sooner)

    @property
    def _keys(self) -> tuple[str, ...]:
        kept = self._config.state_dir
        return ("--keys-required-file", str(kept / "keys-required")) if kept else ()

    @property
    def _secret(self) -> tuple[str, ...]:
        return ("--cluster-secret-file", str(self._config.secret_file)) if self._config.secret_file else ()

    def _controller(self, control: str, routers: tuple[str, ...]) -> ProcessSpec:
        flags = ["--control-listen", control, "--routers", str(len(routers))]
        for number, address in enumerate(routers):
            flags += ["--router-listen", address, "--router-ops-listen", self._ops[f"router-{number}"]]
        flags += ["--control-ops-listen", self._ops["control"]]
        flags += ["--trace-tokens"] if self._config.trace_tokens else []
        flags += [*self._secret, *self._keys]
        argv = (sys.executable, "-m", "outrider_controller", *flags)
        return ProcessSpec("controller", argv, control, cores=self.cores.rest, env=self._env)

    def _gateway(self, grpc_address: str, http_address: str) -> ProcessSpec:
        flags = ("--listen-grpc", grpc_address, "--listen-http", http_address)
        drain = ("--drain-timeout", f"{self._config.stop_timeout_s / 2:g}")
        ops = self._ops["gateway"]
        kept = self._config.receipt_key_file
        receipts = ("--receipt-key-file", str(kept)) if kept else ()
        flags = (*flags, *drain, *self._secret, *self._keys, *receipts, "--ops-listen", ops)
        argv = (sys.executable, "-m", "outrider.gateway", *flags)
        endpoints = {"http": http_address, "ops": ops}
        return ProcessSpec("gateway", argv, grpc_address, endpoints, self.cores.rest, self._env)


def _names(config: StackConfig) -> list[str]:
    """Of all processes and actors that have an ops port."""
    numbered = {"target": config.targets, "draft": config.drafts, "router": config.routers}
    return ["gateway", "control", *(f"{role}-{n}" for role, count in numbered.items() for n in range(count))]
