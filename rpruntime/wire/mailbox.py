"""Sockets of one process: an inbox that every peer may write to, and an outbox to each peer.

    peer A  DEALER ----ipc, CURVE----> ROUTER  this process      one inbox a process, `FOLDER/ROLE.INCARNATION.sock`
    this    DEALER ----ipc, CURVE----> ROUTER  peer B            one outbox a peer, made at the first send

Messages from one sender to one receiver keep their order. The first frame is the sender, `ROLE.INCARNATION`: what a
dead process has left on the way is dropped once its successor is known, which the mailbox learns as it reads
(`FenceMsg`, `RoleDiedMsg`, `ResetMsg`), so that nothing slips through behind the news. A controller that is gone
(`ControllerGoneMsg`) is different: what it had sent counts, so that news comes last of what is here.

The session's key pair is both the server key and the only client key that an inbox accepts (ZAP), so whoever cannot
read `session.json` cannot send. No linger: closing never waits for a dead peer. Not thread-safe: the owner serialises.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Protocol

import zmq
from zmq.auth.thread import ThreadAuthenticator

from rpruntime.interrupts import uninterrupted
from rpruntime.wire.codec import ProtocolError, decode, encode
from rpruntime.wire.messages import FenceMsg, ProtocolErrorMsg, RoleDiedMsg
from rpruntime.wire.succession import ControllerGoneMsg, ResetMsg

log = logging.getLogger(__name__)

MAX_SOCKET_PATH_BYTES = 107
OBSERVER = "observer-"
"""So begin the roles of those who ask once and go; any number of them may come."""
_ANSWER_LINGER_MS = 2000
_MAX_SENDER_BYTES = 80
_MAX_NAMED = 64
"""Senders whose bad messages are logged, each once: a flood of them is to flood no log."""
_TURNED_AWAY = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


def socket_path(folder: Path, role: str, incarnation: int) -> Path:
    """Path of a role's inbox."""
    return folder / f"{role}.{incarnation}.sock"


def new_keys() -> tuple[str, str]:
    """A fresh CURVE key pair (public, secret) for a session, as Z85 text."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


class Post(Protocol):
    """What the shells need of a mailbox; `inline` sessions have one without sockets."""

    role: str

    def send(self, role: str, msg: Any) -> None: ...

    def receive(self, timeout_s: float = 0.0) -> list[Any]: ...

    def close(self) -> None: ...


class _SessionKeyOnly:
    """Credentials callback for the authenticator: one client key is known."""

    def __init__(self, public: str) -> None:
        self._public = public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


class Mailbox:
    """The ZeroMQ mailbox of one process."""

    def __init__(self, folder: Path, role: str, incarnation: int, keys: tuple[str, str]) -> None:
        self.role = role
        self._sender = f"{role}.{incarnation}".encode()
        self._folder = folder
        self._public, self._secret = (key.encode() for key in keys)
        self._incarnations: dict[str, int] = {}
        self._retired: set[str] = set()
        self._path = socket_path(folder, role, incarnation)
        self._context = zmq.Context()
        self._auth = ThreadAuthenticator(self._context, log=logging.getLogger("rpruntime.auth"))
        with uninterrupted():
            self._auth.start()
        self._auth.configure_curve_callback(domain="*", credentials_provider=_SessionKeyOnly(keys[0]))
        self._inbox = self._context.socket(zmq.ROUTER)
        self._inbox.linger = 0
        self._inbox.rcvhwm = 0
        self._inbox.curve_server = True
        self._inbox.curve_publickey = self._public
        self._inbox.curve_secretkey = self._secret
        self._inbox.maxmsgsize = 2 << 20
        self._strangers: Any = self._inbox.get_monitor_socket(_TURNED_AWAY)
        """Tells of peers without the keys; None once one was told of."""
        self._refused: set[str] = set()
        self._inbox.bind(f"ipc://{self._path}")
        self._path.chmod(0o600)
        self._outboxes: dict[str, zmq.Socket[bytes]] = {}
        self._next: list[Any] = []
        """Read from the inbox, and first in what `receive` returns next."""
        self._gone: list[Any] = []
        """`ControllerGoneMsg`s, which come after all that was in the inbox before."""

    def fileno(self) -> int:
        """Edge-triggered descriptor of the inbox, for select loops (read until empty after each wake)."""
        return int(self._inbox.getsockopt(zmq.FD))

    def meet(self, role: str, incarnation: int) -> None:
        """From now on `role` is its `incarnation`-th process; an older one's outbox is closed, its mail dropped."""
        if self._incarnations.get(role, 1) != incarnation and role in self._outboxes:
            self._outboxes.pop(role).close()
        self._incarnations[role] = incarnation

    def retire(self, role: str) -> None:
        """Nobody will be `role` any more: what is sent to it is dropped."""
        self._retired.add(role)
        if role in self._outboxes:
            self._outboxes.pop(role).close()

    def send(self, role: str, msg: Any) -> None:
        """Queue a message for a role; never blocks, and is silent about a dead peer (its death is reported apart)."""
        if role in self._retired:
            return
        if role not in self._outboxes:
            self._outboxes[role] = self._connect(role)
        self._outboxes[role].send_multipart([self._sender, *encode(msg)], flags=zmq.NOBLOCK)
        if role.startswith(OBSERVER):
            self._outboxes.pop(role).close(linger=_ANSWER_LINGER_MS)

    def wait(self, timeout_s: float) -> bool:
        """Whether a message comes within `timeout_s`; takes none, so that a lock is needed only for `receive`."""
        return bool(self._next or self._gone or self._inbox.poll(int(timeout_s * 1000)))

    def receive(self, timeout_s: float = 0.0) -> list[Any]:
        """The messages that are here, waiting up to `timeout_s` for the first one.

        One after which a role or the controller is another process comes first in its batch: answers to what came
        before are for the older one.
        """
        self._note_strangers()
        if timeout_s > 0 and not self.wait(timeout_s):
            return []
        messages, self._next = self._noted(self._next), []
        while True:
            try:
                _, sender, *frames = self._inbox.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                gone, self._gone = self._gone, []
                return self._in_turn(messages, gone)
            except ValueError:
                continue
            name = sender[:_MAX_SENDER_BYTES].decode(errors="replace")
            role, _, number = name.rpartition(".")
            try:
                if len(sender) > _MAX_SENDER_BYTES or not (number.isascii() and number.isdigit()):
                    raise ProtocolError("the sender is not ROLE.INCARNATION")
                if int(number) < self._incarnations.get(role, 1):
                    continue
                if role == "controller":  # it comes without an announcement
                    self.meet(role, int(number))
                msg = decode(frames)
            except ProtocolError as err:
                self._refuse(name, err)
                continue
            if isinstance(msg, ControllerGoneMsg):
                self._gone.append(msg)
            elif isinstance(msg, ResetMsg):  # from the same sender
                gone, self._gone = self._gone, []
                return self._in_turn(messages, [*gone, msg])
            elif isinstance(msg, FenceMsg | RoleDiedMsg):
                return self._in_turn(messages, [msg])
            else:
                messages.append(msg)

    def _in_turn(self, messages: list[Any], news: list[Any]) -> list[Any]:
        """`news` are noted when what came before has been dealt with."""
        if messages:
            self._next = news
            return messages
        return self._noted(news)

    def _noted(self, messages: list[Any]) -> list[Any]:
        for msg in messages:
            self._note(msg)
        return messages

    def _note(self, msg: Any) -> None:
        if isinstance(msg, FenceMsg | RoleDiedMsg):
            self.meet(msg.role, msg.incarnation + isinstance(msg, RoleDiedMsg))
            if msg.retired if isinstance(msg, FenceMsg) else not msg.restarts:
                self.retire(msg.role)

        elif isinstance(msg, ControllerGoneMsg):
            self.meet("controller", msg.incarnation + 1)
        elif isinstance(msg, ResetMsg):
            self.meet("controller", max(msg.incarnation, self._incarnations.get("controller", 1)))
            for role, incarnation in msg.roles.items():
                self.meet(role, incarnation)
            for role in msg.retired:
                self.retire(role)

    def _note_strangers(self) -> None:
        if self._strangers is not None and self._strangers.get(zmq.EVENTS) & zmq.POLLIN:
            log.warning("%s turned a peer away that has not the session's keys (said once)", self.role)
            self._inbox.disable_monitor()
            self._strangers.close()
            self._strangers = None

    def _refuse(self, sender: str, err: ProtocolError) -> None:
        if sender in self._refused or len(self._refused) >= _MAX_NAMED:
            log.debug("message from %r refused: %s", sender, err)
            return
        self._refused.add(sender)
        log.warning("message from %r refused: %s (its first; more are not logged)", sender, err)
        role = sender.rpartition(".")[0]
        if role in self._outboxes:
            self.send(role, ProtocolErrorMsg(self.role, str(err)))

    def _connect(self, role: str) -> zmq.Socket[bytes]:
        outbox = self._context.socket(zmq.DEALER)
        outbox.linger = 0
        outbox.sndhwm = 0
        outbox.reconnect_ivl = 20
        outbox.curve_serverkey = self._public
        outbox.curve_publickey = self._public
        outbox.curve_secretkey = self._secret
        outbox.connect(f"ipc://{socket_path(self._folder, role, self._incarnations.get(role, 1))}")
        return outbox

    def flush(self, timeout_s: float) -> None:
        """Close the outboxes, giving queued messages up to `timeout_s` to leave."""
        for outbox in self._outboxes.values():
            outbox.close(linger=int(timeout_s * 1000))
        self._outboxes.clear()

    def close(self) -> None:
        """Close everything at once and remove the inbox's socket file."""
        self._auth.stop()
        for outbox in self._outboxes.values():
            outbox.close(linger=0)
        if self._strangers is not None:
            self._strangers.close()
        self._inbox.close(linger=0)
        self._context.destroy(linger=0)
        self._path.unlink(missing_ok=True)
