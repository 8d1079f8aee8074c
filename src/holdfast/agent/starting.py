"""Starts an agent: takes the run's directory, puts the agent's parts together, and lets go of everything at the end."""

from __future__ import annotations

import queue
import sys
from contextlib import ExitStack
from pathlib import Path

from holdfast.agent.agent import Agent, Message, Parts
from holdfast.agent.ending import AgentEnding
from holdfast.agent.finishing import FinishNote
from holdfast.agent.history import History
from holdfast.agent.hosts.among_hosts import AmongHosts
from holdfast.agent.ledger_news import LedgerListener
from holdfast.agent.ledgers import AgentLedgers, StartPatience
from holdfast.agent.policy import STOP_GRACE_S, Policy
from holdfast.agent.report import AgentReporter
from holdfast.agent.servers.serving import Serving
from holdfast.agent.settings import RunSettings, describe
from holdfast.agent.signals import Signals
from holdfast.agent.workers.crew import Crew
from holdfast.agent.workers.heartbeat_watch import HeartbeatWatch, limits_of
from holdfast.agent.workers.processes import DeathWatch, allow_open_files
from holdfast.agent.workforce import Died, Workforce
from holdfast.checkpoint.host_memory.place import memory_directory
from holdfast.core.words import KEY_SIZE
from holdfast.net.addresses import address_towards, check_listen
from holdfast.observe.terminal import Screen
from holdfast.placement.directory import RunDirectory
from holdfast.placement.proc import find_workers
from holdfast.trust.keys import Keys, load_keys


def run_agent(settings: RunSettings, home: Path) -> int:
    """Run until the training is finished, stopped or hopeless. Returns the exit code."""
    settings.validate()
    allow_open_files(settings.workers + settings.spares + settings.servers)
    keys = load_keys(settings.keys) if settings.keys else None
    directory = RunDirectory(home, settings.name, settings.host)
    directory.create()
    with directory.locked(), ExitStack() as open_parts:
        history = History(directory.events)
        living = find_workers(directory.path)
        listen = settings.listen or (address_towards(settings.ledger) if settings.ledger else "")
        if listen:
            own = bool(settings.ledger)  # the agent needs a port itself
            needed = settings.workers + settings.spares + settings.servers - len(living)
            check_listen(listen, own + max(1, needed))
        screen = Screen(sys.stdout)
        agent = Agent(settings, _parts(settings, directory, history, screen, open_parts, listen=listen, keys=keys))
        open_parts.callback(agent.close)
        return agent.run()


def _parts(
    settings: RunSettings,
    directory: RunDirectory,
    history: History,
    screen: Screen,
    open_parts: ExitStack,
    *,
    listen: str,
    keys: Keys | None,
) -> Parts:
    """What is opened is closed by `open_parts`, the last first; the workers stay."""
    host, inbox = settings.host, queue.SimpleQueue[Message]()
    signals = Signals(inbox.put)
    open_parts.callback(signals.restore)
    reporter = AgentReporter(settings, directory, history.record, screen)
    open_parts.callback(reporter.close)
    policy = _policy(settings)
    secret = directory.secret() if keys is None else keys.secret
    socket_dir = directory.socket_dir()
    directory.write(describe(settings, directory.home, socket_dir))
    ledgers = AgentLedgers(directory, settings.ledger, socket_dir, secret)
    open_parts.callback(ledgers.close)
    ledger, patience = ledgers.main, StartPatience(settings.ledger, reporter.say)
    note = FinishNote(ledger, KEY_SIZE + host, wait_s=settings.outage_s if settings.ledger else None)
    deaths = DeathWatch(ledgers.deaths, lambda process, *how: inbox.put(Died(process, *how)))
    open_parts.callback(deaths.close)
    crew = Crew(settings, directory, socket_dir, ledger, deaths, reporter.refused, listen)
    open_parts.callback(crew.close)
    heartbeat_watch = HeartbeatWatch(directory.path, limits_of(settings), inbox.put, host=host)
    open_parts.callback(heartbeat_watch.close)
    among = None
    if keys is not None and settings.ledger:
        among = AmongHosts(settings, directory, ledgers, patience, keys, listen, heartbeat_watch, inbox.put)
        open_parts.callback(among.close)
    workforce = Workforce(policy, crew, heartbeat_watch, reporter, ledger)
    serving = Serving.of(settings, directory, socket_dir, ledgers, reporter, inbox.put, listen=listen)
    open_parts.callback(serving.close)
    return Parts(
        directory=directory,
        inbox=inbox,
        signals=signals,
        history=history,
        reporter=reporter,
        policy=policy,
        crew=crew,
        workforce=workforce,
        heartbeat_watch=heartbeat_watch,
        ledgers=ledgers,
        news=LedgerListener(ledger, host, policy, workforce, heartbeat_watch, reporter, note, bool(settings.script)),
        among=among,
        serving=serving,
        patience=patience,
        ending=AgentEnding(
            directory, socket_dir, memory_directory(directory.path, secret), ledger, note, reporter, inbox
        ),
    )


def _policy(settings: RunSettings) -> Policy:
    # Whoever is asked to leave may save first, which takes as long as the notice at most.
    grace_s = max(STOP_GRACE_S, settings.checkpoint.notice_s + 5.0)
    limits = settings.restarts, grace_s, settings.replace_slow, settings.strikes
    return Policy(settings.workers, settings.spares, *limits, serves=settings.only_serves)
