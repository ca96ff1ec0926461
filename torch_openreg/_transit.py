"""Finds descriptions of shared memory that no process can read any more, and ends them.

A description keeps its block from the send until an import. If the process that has read it from a
pipe is killed before it imports, nothing in the memory shows that. So a sender notes which pipe, or
which new process, each description went to. It is lost if the pipe has nothing unread, and no other
process has it open for reading. A description that went another way is never taken for lost.

A description that is wrongly taken for lost does no harm to data: its import is refused.
"""

import collections
import fcntl
import functools
import os
import re
import select
import socket
import struct
import threading
import weakref

from . import _C

# ---- What a process sent ----


class _Block:
    """A block with descriptions in transit, and how many went to each channel."""

    def __init__(self, description):
        self.description = description
        self.unsent = 0
        self.sent = collections.Counter()
        self.kept = 0  # more copies of a description, which may be anywhere

    def in_transit(self):
        return _C._ipc_transit(self.description)

    def end(self, lost):
        """Ends the descriptions that went to the channels `lost`."""
        for channel in lost & self.sent.keys():
            del self.sent[channel]
        _C._ipc_transit(self.description, self.unsent + self.kept + sum(self.sent.values()))


class _OfThread(threading.local):
    made = None  # the keys of the blocks that it has exported during Process.start()


def _reset():
    global _lock, _blocks, _channels, _reading, _enough, _of_thread
    _lock = threading.RLock()
    _blocks = {}  # by file, block and generation
    _channels = {}
    _reading = []  # the descriptors that threads read from
    _enough = 64  # blocks after which those that are not in transit are forgotten
    _of_thread = _OfThread()


_reset()
os.register_at_fork(after_in_child=_reset)


def note_export(description, memory):
    """After each export; `memory` is what _C._ipc_read returns."""
    global _enough
    key = _key_of(memory)
    with _lock:
        block = _blocks.get(key)
        if block is None or _C._ipc_transit(description) == 1:
            block = _blocks[key] = _Block(description)
        block.unsent += 1
        if len(_blocks) > _enough:
            _forget_imported()
            _enough = max(64, 2 * len(_blocks))
    if _of_thread.made is not None:
        _of_thread.made.append(key)


def _forget_imported():
    for key, block in list(_blocks.items()):
        if not block.in_transit():
            del _blocks[key]
    used = {channel for block in _blocks.values() for channel in block.sent}
    for name in [name for name, channel in _channels.items() if channel not in used]:
        del _channels[name]


def _keys_in(data):
    """The keys of the blocks whose descriptions are in the bytes of a message."""
    with _lock:
        start = next(iter(_blocks.values())).description[:12] if _blocks else None
    if start is None:
        return
    for match in re.finditer(re.escape(start), data):
        description = bytes(data[match.start() : match.start() + _C._IPC_MEMORY_BYTES])
        if len(description) == _C._IPC_MEMORY_BYTES:
            yield _key_of(_C._ipc_read(description))


def _key_of(memory):
    _, file, _, _, generation, _, block = memory
    return file, block, generation


def _note_sent(keys, channel):
    for key in keys:
        block = _blocks.get(key)
        if block is None:
            continue
        if block.unsent and channel is not None:
            block.unsent -= 1
            block.sent[channel] += 1
        else:
            block.kept += 1


# ---- Channels: where a description went ----


class _Pipe:
    """A pipe. A descriptor of its path keeps neither end of it open."""

    def __init__(self, connection):
        self.link = os.readlink(f"/proc/self/fd/{connection.fileno()}")
        self.path = os.open(f"/proc/self/fd/{connection.fileno()}", os.O_PATH | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.path).atexit = False

    def has_no_reader(self):
        """Whether no process has it open, and it is not on its way to one."""
        end = os.open(f"/proc/self/fd/{self.path}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return _has(end, select.POLLERR)
        finally:
            os.close(end)


class _Socket:
    """One end of a duplex pipe."""

    def __init__(self, connection):
        self.link = f"socket:[{_peer_of(os.fstat(connection.fileno()).st_ino)}]"
        self.connection = weakref.ref(connection)

    def has_no_reader(self):
        """Whether the other end is closed; unknown if this process has closed its own."""
        connection = self.connection()
        return (
            connection is not None
            and not connection.closed
            and _has(connection.fileno(), select.POLLHUP)
        )


class _Process:
    """A process that got descriptions with its arguments."""

    link = None

    def __init__(self, pid):
        try:
            self.file = os.pidfd_open(pid)
        except ProcessLookupError:
            self.file = None
        else:
            weakref.finalize(self, os.close, self.file).atexit = False

    def has_no_reader(self):
        return self.file is None or _has(self.file, select.POLLIN)


def _has(descriptor, event):
    poll = select.poll()
    poll.register(descriptor, event)
    return any(found & event for _, found in poll.poll(0))


def _peer_of(inode):
    """The inode of a Unix socket's other end, from the kernel; 0 if it does not say."""
    head = struct.pack("=IHHII", 40, 20, 1, 1, 0)  # nlmsghdr: SOCK_DIAG_BY_FAMILY, a request
    every = 0xFFFFFFFF  # state, and cookie
    request = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, every, inode, 4, every, every)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as diagnosis:  # NETLINK_SOCK_DIAG
        diagnosis.settimeout(1)
        diagnosis.sendto(head + request, (0, 0))
        answer = diagnosis.recv(4096)
    size, kind, peer = struct.unpack_from("=HHI", answer.ljust(40, b"\0"), 32)
    return peer if (size, kind) == (8, 2) else 0  # UNIX_DIAG_PEER


def _channel_to(process):
    """None if the system does not watch processes."""
    try:
        return _Process(process.pid)
    except OSError:
        return None


def _channel_of(connection):
    """None if its readers cannot be found."""
    try:
        name = os.readlink(f"/proc/self/fd/{connection.fileno()}")
        if name not in _channels:
            _channels[name] = (_Socket if name.startswith("socket") else _Pipe)(connection)
        return _channels[name]
    except OSError:
        return None


# ---- Which of them are lost ----


class _Readers:
    """The processes that have the other ends of channels open, by /proc."""

    def __init__(self, links):
        self.ours = {link: [] for link in links}
        self.others = set()
        for process in os.listdir("/proc"):
            if process.isdigit():
                self._look_at(process)

    def _look_at(self, process):
        folder = f"/proc/{process}"
        try:
            for descriptor in os.listdir(f"{folder}/fd"):
                self._look_at_descriptor(folder, descriptor, int(process) == os.getpid())
        except PermissionError:  # another user's, or one with more rights
            if _may_have_inherited(int(process)):
                self.others.update(self.ours)
        except OSError:  # it has ended
            pass

    def _look_at_descriptor(self, folder, descriptor, own):
        try:
            link = os.readlink(f"{folder}/fd/{descriptor}")
            if link not in self.ours or not _reads(f"{folder}/fdinfo/{descriptor}"):
                return
        except FileNotFoundError:  # closed
            return
        if own:
            self.ours[link].append(int(descriptor))
        else:
            self.others.add(link)

    def have(self, channel):
        """Whether a process, also this one, may read a description from the channel, or has read it
        from there and not imported it yet."""
        if channel.has_no_reader():
            return False
        ours = self.ours.get(channel.link)
        if not ours or channel.link in self.others:
            return True
        return any(end in _reading or _unread(end) for end in ours)


def _may_have_inherited(process):
    """Whether a process that does not show its descriptors may have one of this process's: it comes
    from this one, or from the one that multiprocessing started this one from."""
    from multiprocessing import parent_process

    family = (os.getpid(), getattr(parent_process(), "pid", None))
    try:
        while process not in family and process > 1:
            process = _parent_of(process)
    except OSError:  # it has ended
        return False
    return process in family


def _parent_of(process):
    with open(f"/proc/{process}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def _reads(info):
    with open(info) as file:
        flags = int(re.search(r"^flags:\s*(\d+)", file.read(), re.M)[1], 8)
    return not flags & os.O_PATH and flags & os.O_ACCMODE != os.O_WRONLY


def _unread(descriptor):
    import termios  # not a part of `import torch`

    (count,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    return count


def end_lost():
    """Ends the descriptions of this process that are lost."""
    with _lock:
        _forget_imported()
        channels = {channel for block in _blocks.values() for channel in block.sent}
        if not channels:
            return
        readers = _Readers({channel.link for channel in channels})
        lost = {channel for channel in channels if not readers.have(channel)}
        if lost:
            for block in _blocks.values():
                block.end(lost)
            _forget_imported()


# ---- Installation ----


def _send_bytes(send):
    @functools.wraps(send)
    def send_bytes(self, buf):
        try:
            return send(self, buf)
        finally:
            if _blocks:
                keys = list(_keys_in(buf))
                with _lock:
                    _note_sent(keys, _channel_of(self) if keys else None)

    return send_bytes


def _recv_bytes(receive):
    @functools.wraps(receive)
    def recv_bytes(self, maxsize=None):
        descriptor = self._handle
        _reading.append(descriptor)
        try:
            buf = receive(self, maxsize)
            if _blocks and buf is not None:  # its own, which it imports later
                keys = list(_keys_in(buf.getbuffer()))
                with _lock:
                    _note_sent(keys, None)
            return buf
        finally:
            _reading.remove(descriptor)

    return recv_bytes


def _start(start):
    @functools.wraps(start)
    def start_process(self):
        outer, _of_thread.made = _of_thread.made, []
        try:
            start(self)
            if _of_thread.made:
                with _lock:
                    _note_sent(_of_thread.made, _channel_to(self))
        finally:
            _of_thread.made = outer

    return start_process


def install():
    import multiprocessing.connection
    import multiprocessing.process

    connection = multiprocessing.connection.Connection
    connection._send_bytes = _send_bytes(connection._send_bytes)
    connection._recv_bytes = _recv_bytes(connection._recv_bytes)
    process = multiprocessing.process.BaseProcess
    process.start = _start(process.start)
