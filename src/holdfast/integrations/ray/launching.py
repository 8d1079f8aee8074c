"""holdfast.integrations.ray.launch: a function trained by actors that Ray places, and replaced when they are lost.

The driver is what an agent is on one host: it serves the ledger, starts workers, fences the dead, and says how it ends
(supervising.py decides). It is not on the path of a step. Belongs to the thread that called launch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from holdfast.agent.settings import check_workers
from holdfast.checkpoint.settings import CheckpointSettings
from holdfast.core.errors import EXIT_EVICTED, ConfigError, LaunchFailed, LedgerError
from holdfast.core.options.declaring import options_of, parse_options
from holdfast.core.options.run import WorkerOptions
from holdfast.integrations.ray.finding import find_ray, node_address, nodes_that_go
from holdfast.integrations.ray.run_ledger import RunLedger
from holdfast.integrations.ray.supervising import AskToLeave, End, RunEnd, Start, Supervision, TellOfRoom
from holdfast.integrations.ray.worker_actor import ActorPlace, Ended, WorkerActor
from holdfast.launching.launch import Launched
from holdfast.placement.directory import RunDirectory, fresh_name, home_directory
from holdfast.placement.environment import WorkerEnvironment, process_variables

LOOK_S = 0.5
NOTICES_S = 2.0  # between two looks at which nodes will be taken away
SETTLED_S = 60.0  # a worker that lived for so long has put its slot's setbacks behind it
ARGUMENTS_BYTES_MAX = 64 * 2**20
_TAKEN = ("workers", "servers", "replicas", "horovod", "host", "listen", "advertise", "path", "memory")


def launch(
    fn: Callable[..., Any],
    *,
    workers: int,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    resources: Mapping[str, Any] | None = None,
    run: str = "",
    dir: str | None = None,
    **options: Any,
) -> Launched:
    """Call `fn(*args, **kwargs)` in `workers` actors, which take part in one run by the `holdfast.join` in it.

    `resources` is what each actor asks Ray for, {"num_cpus": 1} if nothing is said. `run` names the run, so that it can
    go on after a stop; `dir` is where each node keeps its part. `options` are those of `holdfast run` that workers and
    checkpoints have: checkpoint="s3://…", save_every="30s", lease="5s", ledger="etcd://…" with keys="DIR".
    Raises LaunchFailed with the worker's traceback if the function fails everywhere.
    """
    from holdfast.state.objects import pack_object

    ray = find_ray()
    check_workers(workers)
    arguments = pack_object([list(args), dict(kwargs or {})], path="the arguments", bytes_max=ARGUMENTS_BYTES_MAX)
    shared, saving = _settings(options)
    if not ray.is_initialized():
        ray.init()
    home = home_directory(dir)
    name = run or fresh_name(home, getattr(fn, "__name__", "run"), now=time.time())
    where, keys = RunDirectory(home, name), str(shared.pop("keys", ""))
    ledger = RunLedger(where, node_address(), url=str(shared.pop("ledger", "")), keys=keys)
    try:
        ledger.begin(name)
        ledger.resize(workers)
        variables = _variables(where, ledger, shared, saving)
        place = ActorPlace(run=name, home=dir or "", host="", worker="", variables=variables, keys=ledger.keys)
        driver = Driver(ray, ledger, Supervision(workers), place, {"num_cpus": 1, **(resources or {})})
        print(f"holdfast | run {name} on Ray, {workers} workers; ledger {ledger.url}", flush=True)
        return driver.run(fn, arguments, where)
    finally:
        ledger.close()


def _settings(options: Mapping[str, Any]) -> tuple[dict[str, Any], CheckpointSettings]:
    kinds = (WorkerOptions, CheckpointSettings)
    known = {one.flag.removeprefix("--").replace("-", "_"): one for kind in kinds for one in options_of(kind)}
    words = {}
    for keyword, value in options.items():
        if keyword not in known or known[keyword].setting in _TAKEN:
            raise ConfigError(
                f"launch on Ray has no argument {keyword}", hint="it has the options of workers and of checkpoints"
            )
        if value is not None:
            words[known[keyword].flag] = str(value)
    saving = parse_options(CheckpointSettings, words)
    settings = CheckpointSettings(**saving, given=tuple(saving)).at_home()
    settings.validate()
    shared = parse_options(WorkerOptions, words)
    if bool(shared.get("ledger")) != bool(shared.get("keys")):
        raise ConfigError("ledger= and keys= go together", hint="leave both out, and the driver serves a ledger")
    return shared, settings


def _variables(
    directory: RunDirectory, ledger: RunLedger, shared: Mapping[str, Any], saving: CheckpointSettings
) -> dict[str, str]:
    """What all workers are told. Places of a node are said there."""
    environment = WorkerEnvironment(
        run_dir=directory.path,
        worker="",
        socket_dir=directory.path,
        checkpoint=saving.placed(directory.path, alone=False).encode(),
        ledger=ledger.url,
        **{one.name: shared[one.name] for one in fields(WorkerOptions) if one.name in shared},
    )
    return environment.to_variables()


@dataclass(eq=False)
class _Actor:
    """One worker of a slot: first it is asked where it is, then it works."""

    slot: int
    handle: Any
    worker: str = ""
    node: str = ""
    began: float = 0.0
    asked: bool = False


class Driver:
    def __init__(
        self, ray: Any, ledger: RunLedger, supervision: Supervision, place: ActorPlace, resources: Mapping[str, Any]
    ) -> None:
        self._ray = ray
        self._ledger = ledger
        self._supervision = supervision
        self._place = place
        runtime = {"env_vars": process_variables()}  # before the interpreter starts: hash seed and threads
        options = {"max_restarts": 0, "max_concurrency": 3, "runtime_env": runtime, "scheduling_strategy": "SPREAD"}
        self._actors = ray.remote(WorkerActor).options(**{**options, **resources})
        self._resources = dict(resources)
        self._waiting: dict[Any, _Actor] = {}  # by what is waited for
        self._questions: dict[Any, _Actor] = {}  # who was asked how far it is, by its answer
        self._ended: dict[int, Ended] = {}  # the last end of each slot
        self._looked = 0.0
        self._fn: Any = None
        self._arguments = ""

    def run(self, fn: Callable[..., Any], arguments: str, where: RunDirectory) -> Launched:
        self._fn, self._arguments = self._ray.put(fn), arguments
        interrupted = False
        try:
            while True:
                try:
                    end = self._turn()
                    if end is not None:
                        break
                except KeyboardInterrupt:
                    if interrupted:
                        raise
                    interrupted = True
                    self._say("Ctrl-C: the workers finish the step and leave; once more ends them at once")
                    self._ledger.stop("Ctrl-C")
                    self._supervision.stop("Ctrl-C", time.monotonic())
                    self._drop_who_has_not_begun(time.monotonic())
        finally:
            for actor in self._waiting.values():
                self._ray.kill(actor.handle)
        if interrupted:
            raise KeyboardInterrupt
        return self._launched(end, where)

    def _turn(self) -> RunEnd | None:
        for action in self._supervision.tick(time.monotonic()):
            match action:
                case Start(slot):
                    self._start(slot)
                case AskToLeave(slot):
                    self._ask_to_leave(slot)
                case End(slot):
                    self._end_straggler(slot)
                case TellOfRoom(slots):
                    self._tell_of_room(len(slots))
                case RunEnd():
                    return action
        if not self._waiting:
            time.sleep(LOOK_S)
        ready, _ = self._ray.wait(list(self._waiting), timeout=LOOK_S) if self._waiting else ([], [])
        for one in ready:
            self._take(one, time.monotonic())
        self._look(time.monotonic())
        return None

    def _start(self, slot: int) -> None:
        handle = self._actors.remote()
        self._waiting[handle.where.remote()] = _Actor(slot, handle)

    def _take(self, one: Any, now: float) -> None:
        actor = self._waiting.pop(one)
        try:
            answer = self._ray.get(one)
        except self._ray.exceptions.RayTaskError as error:  # nothing of ours raises: the function cannot be had there
            self._take_end(actor, Ended(kind="raised", reason=_first_line(error), said=str(error)), now)
            return
        except self._ray.exceptions.RayError as error:
            if getattr(error, "actor_init_failed", False):
                self._take_end(actor, Ended(kind="raised", reason=_first_line(error), said=str(error)), now)
            else:
                self._lost(actor, error, now)
            return
        if isinstance(answer, str):
            self._ray.kill(actor.handle)
            self._take_end(actor, Ended(**json.loads(answer)), now)
            return
        try:
            actor.node, host = answer["node"], f"n{answer['node'][:8]}"
            actor.worker, actor.began = self._ledger.next_worker(actor.slot, host), now
            self._supervision.placed(actor.slot)
        except LedgerError as error:
            self._lost(actor, error, now)
            return
        variables = {**self._place.variables, "HOLDFAST_LISTEN": answer["address"]}
        place = asdict(self._place) | {"host": host, "worker": actor.worker, "variables": variables}
        self._waiting[actor.handle.work.remote(place, self._fn, self._arguments)] = actor
        self._say(f"{actor.worker} started (process {answer['pid']} of node {actor.node[:8]})")

    def _lost(self, actor: _Actor, error: Exception, now: float) -> None:
        self._ray.kill(actor.handle)
        if actor.worker:
            self._fence(actor)
            self._say(f"{actor.worker} is lost: {_first_line(error)}")
        self._supervision.died(actor.slot, now)

    def _fence(self, actor: _Actor) -> None:
        if not actor.worker:
            return
        with suppress(LedgerError):  # its lease runs out
            self._ledger.fence(actor.worker)

    def _take_end(self, actor: _Actor, ended: Ended, now: float) -> None:
        self._fence(actor)
        self._ended[actor.slot] = ended
        who, reason = actor.worker or f"slot {actor.slot}", f" ({ended.reason})" if ended.reason else ""
        self._say(f"{who} ended: {ended.kind}{reason}")
        if ended.kind == "returned":
            self._supervision.returned(actor.slot, now)
            self._drop_who_has_not_begun(now)
        elif ended.kind == "left" and ended.code in (0, EXIT_EVICTED):
            self._supervision.left(actor.slot, now, stopped=self._stopped_by())
        else:
            self._supervision.raised(actor.slot, now, hopeless=ended.kind != "raised")

    def _drop_who_has_not_begun(self, now: float) -> None:
        """Ray may not have room for them; the training is over."""
        for one, actor in list(self._waiting.items()):
            if not actor.worker:
                del self._waiting[one]
                self._ray.kill(actor.handle)
                self._supervision.died(actor.slot, now)

    def _stopped_by(self) -> str:
        with suppress(LedgerError):
            return self._ledger.stopped_by()
        return ""

    def _ask_to_leave(self, slot: int) -> None:
        for actor in self._waiting.values():
            if actor.slot == slot and actor.worker:
                self._say(f"asking {actor.worker} to leave: its node {actor.node[:8]} will be taken away")
                actor.handle.leave.remote()

    def _end_straggler(self, slot: int) -> None:
        for one, actor in list(self._waiting.items()):
            if actor.slot == slot:
                del self._waiting[one]
                self._say(f"ending {actor.worker or f'slot {slot}'}: another worker is through, and it does not get on")
                self._ray.kill(actor.handle)
                self._fence(actor)
        self._supervision.died(slot, time.monotonic())

    def _tell_of_room(self, count: int) -> None:
        wanted = ", ".join(f"{name}={amount}" for name, amount in self._resources.items())
        self._say(
            f"{count} of {self._supervision.workers} workers wait for a place: "
            f"Ray has no room for an actor with {wanted}\n"
            "  hint: `ray status` shows what the cluster has; workers= and resources= say what is asked for"
        )

    def _ask_how_far(self, now: float) -> None:
        """The training is over on one worker. The others may be long behind their loops, or may hang."""
        asked = {actor.slot for actor in self._questions.values()}
        for actor in self._waiting.values():
            if actor.worker and actor.slot not in asked:
                self._questions[actor.handle.progress.remote()] = actor
        if not self._questions:
            return
        ready, _ = self._ray.wait(list(self._questions), num_returns=len(self._questions), timeout=0)
        for one in ready:
            actor = self._questions.pop(one)
            with suppress(self._ray.exceptions.RayError):  # it is lost, which is seen where its end is waited for
                step, through = self._ray.get(one)
                if actor in self._waiting.values():
                    self._supervision.heard(actor.slot, int(step), now, through=bool(through))

    def _look(self, now: float) -> None:
        if self._supervision.done:
            self._ask_how_far(now)
        for actor in self._waiting.values():
            if actor.began and now - actor.began > SETTLED_S:
                self._supervision.got_on(actor.slot)
        if now - self._looked < NOTICES_S:
            return
        self._looked, going = now, nodes_that_go()
        for actor in self._waiting.values():
            if actor.node in going and not actor.asked:
                actor.asked = True
                self._supervision.node_goes(actor.slot)

    def _launched(self, end: RunEnd, where: RunDirectory) -> Launched:
        from holdfast.state.objects import unpack_object

        done = sorted((one.leader, one.step, -slot) for slot, one in self._ended.items() if one.kind == "returned")
        if end.outcome == "failed":
            failed = self._ended.get(end.slot if end.slot is not None else -1, Ended(kind="died"))
            if failed.kind == "refused":
                raise ConfigError(*failed.reason.split("\n  hint: ", 1)[:1], hint=failed.reason.partition("hint: ")[2])
            raise LaunchFailed(
                f"run {where.name} failed: {end.reason}",
                hint="Ray's own logs have what the workers printed",
                worker=f"slot {end.slot}",
                traceback=failed.said,
                exit_code=failed.code or 1,
            )
        last = self._ended[-done[-1][2]] if done else Ended(kind="left")
        return Launched(
            value=unpack_object(last.said) if done else None,
            outcome=end.outcome,
            reason=end.reason,
            run=where.name,
            directory=Path(where.path),
            step=last.step,
            digest=last.digest,
            exit_code=0,
        )

    def _say(self, text: str) -> None:
        print(f"holdfast | {text}", flush=True)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
