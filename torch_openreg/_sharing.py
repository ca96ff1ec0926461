"""Device tensors and events for other processes, as torch.multiprocessing sends CUDA's.

A process sends a description of the memory, which is plain bytes. The receiver asks the sender for
the file, unless it has mapped it already, by the name and the secret that the description has.
docs/sharing.md has the life of a block.
"""

import contextlib
import os
import socket
import struct
import threading
import time
from multiprocessing.reduction import ForkingPickler
from typing import NamedTuple

import torch
from torch.multiprocessing import reductions

from . import _C, _transit
from ._patches import replace, wrap, wrapped
from .openreg._lazy import _lazy_call, _lazy_init
from .openreg._utils import is_ours, type_name

# ---- Files, between two processes of one user ----

_TIMEOUT = 60  # seconds that a fetch may take
_ADDRESS = struct.Struct("8s16s")  # a socket's name, and the secret that its owner expects
_ID = _C._IPC_ID_BYTES
_MOMENT = _C._IPC_MOMENT_BYTES


class _Server:
    """Hands out this process's files, from a thread that starts at the first export. A forked child
    has another name, and another secret."""

    def __init__(self):
        self._lock = threading.Lock()
        self._socket = None
        self.address = None

    def start(self):
        with self._lock:
            if self.address is None:
                name, self._secret = os.urandom(8), os.urandom(16)
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket.bind(_socket_name(name))
                self._socket.listen(128)
                thread = threading.Thread(target=self._serve, name="openreg files", daemon=True)
                thread.start()
                self.address = _ADDRESS.pack(name, self._secret)
        return self.address

    def _serve(self):
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:  # too many open files
                time.sleep(0.1)
                continue
            with peer, contextlib.suppress(OSError, RuntimeError):
                peer.settimeout(5)
                self._answer(peer)

    def _answer(self, peer):
        import hmac  # not a part of `import torch`

        if _user_of(peer) != os.getuid():
            return
        request = _receive(peer, _ADDRESS.size - 8 + _ID)
        if not hmac.compare_digest(request[:-_ID], self._secret):
            return
        descriptor = _C._ipc_file(request[-_ID:])
        try:
            socket.send_fds(peer, [b"+"], [descriptor])
        finally:
            os.close(descriptor)

    def forget(self):
        """In a forked child: the name is the parent's."""
        if self._socket is not None:
            self._socket.close()
        self.__init__()


def _socket_name(name):
    return "\0openreg-" + name.hex()


def _user_of(peer):
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", credentials)[1]


def _receive(peer, count):
    data = b""
    while len(data) < count:
        part = peer.recv(count - len(data))
        if not part:
            raise OSError("the other process closed the connection")
        data += part
    return data


_server = _Server()
_origins = {}  # the address of the process that has sent a file, by the file's id
os.register_at_fork(after_in_child=lambda: (_server.forget(), _origins.clear()))


def _fetch_from(address, file):
    name, secret = _ADDRESS.unpack(address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(_TIMEOUT)
        peer.connect(_socket_name(name))
        if _user_of(peer) != os.getuid():
            raise OSError("another user's process has the sender's name")
        peer.sendall(secret + file)
        _, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
    if not descriptors:
        raise OSError("the sender does not have the memory any more")
    try:
        _C._ipc_add_file(file, descriptors[0])
    finally:
        os.close(descriptors[0])


def _fetch(file, addresses):
    """Opens the file of that id, unless it is open, from the first process that has it."""
    if _C._ipc_has(file):
        return
    failures = []
    for address in addresses:
        try:
            _fetch_from(address, file)
        except OSError as error:
            failures.append(str(error))
        else:
            _origins.setdefault(file, address)
            return
    raise RuntimeError(
        f"cannot get {type_name()} memory from the process that sent it: {'; '.join(failures)}\n"
        "  help: the sender must live until the receiver has the tensor"
    )


def _addresses(data):
    if not data or len(data) % _ADDRESS.size:
        raise ValueError(
            f"the handle of shared memory has an id and {_ADDRESS.size} bytes for each address, "
            f"got {len(data)} bytes of them"
        )
    return [data[i : i + _ADDRESS.size] for i in range(0, len(data), _ADDRESS.size)]


# ---- Storages ----

_storages = reductions.SharedCache()  # by file, offset and generation
_send_lock = threading.RLock()


class _Memory(NamedTuple):
    """The fields of a description, as the core reads them."""

    device: int
    file: bytes
    """The file's id."""
    offset: int
    size: int
    generation: int
    events: bytes | None
    """The id of the file with the event to wait for, if there is one."""
    block: int
    """Where its block begins."""

    @property
    def key(self):
        """In _storages."""
        return self[1:5]


def _share(storage):
    """What ``UntypedStorage._share_cuda_`` returns: device, handle, bytes, offset, and the
    description in place of a counter, twice, as it has the event too."""
    index = storage.device.index
    if storage.nbytes() == 0:
        return (index, None, 0, 0, b"", 0, b"", False)
    description = _C._ipc_export(storage.data_ptr(), storage.nbytes(), index)
    memory = _Memory(*_C._ipc_read(description))
    _transit.note_export(description, memory)
    _storages[memory.key] = reductions.StorageWeakRef(storage)
    handle = memory.file + _server.start() + _origins.get(memory.file, b"")
    has_event = memory.events is not None
    return (index, handle, memory.size, memory.offset, description, 0, description, has_event)


def _check(memory, device, handle, size, offset):
    index = torch.device(device).index if isinstance(device, str | torch.device) else device
    for name, given, allowed in (
        ("device", index, memory.device),
        ("handle", handle[:_ID], memory.file),
        ("size", size, memory.size),
        ("offset", offset, memory.offset),
    ):
        if given != allowed:
            raise ValueError(
                f"the {name} of shared {type_name()} memory is {allowed!r}, got {given!r}"
            )


def _open_files(memory, handle):
    addresses = _addresses(handle[_ID:])
    _fetch(memory.file, addresses)
    if memory.events is not None:
        _fetch(memory.events, addresses[:1])


def _rebuild(device, handle, size, offset, description, _offset, _event, _sync):
    """The storage of a description: the present one, if this process has it."""
    _lazy_init()
    memory = _Memory(*_C._ipc_read(description))
    _check(memory, device, handle, size, offset)
    _open_files(memory, handle)
    with _send_lock:
        storage = _present(memory.key)
        if storage is not None:
            _C._ipc_receive(description)
            return storage
        storage = _C._ipc_import(description)
        _storages[memory.key] = reductions.StorageWeakRef(storage)
    return storage


def _present(key):
    ref = _storages.get(key)
    return None if ref is None else torch.UntypedStorage._new_with_weak_ptr(ref.cdata)


def rebuild_storage(device, *shared):
    """The storage that another process has sent."""
    if shared[0] is None:
        return torch.UntypedStorage(0, device=torch.device(type_name(), device))
    return _rebuild(device, *shared)


def rebuild_tensor(tensor_cls, size, stride, tensor_offset, storage_cls, dtype, device, *shared):
    """The tensor that another process has sent, from ``rebuild_cuda_tensor``'s arguments."""
    handle, nbytes, offset, requires_grad, *rest = shared
    storage = rebuild_storage(device, handle, nbytes, offset, *rest)
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
    metadata = (tensor_offset, size, stride, requires_grad)
    return reductions.rebuild_tensor(tensor_cls, typed, metadata)


def rebuild_lazy_tensor(lazy, *arguments):
    """A tensor that is conjugated or negated lazily, which PyTorch's own functions forget."""
    tensor = rebuild_tensor(*arguments)
    torch._utils.set_tensor_metadata(tensor, lazy)
    return tensor


def _reduce_storage(reduce, storage):
    if not is_ours(storage.device):
        return reduce(storage)
    return (rebuild_storage, _share(storage))


def _is_plain(tensor):
    """Whether the tensor has one storage of ours, and PyTorch would not take it apart."""
    return (
        is_ours(tensor.device)
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and not torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)
    )


def _refuse_non_leaf(tensor):
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd "
            "does not support crossing process boundaries.  If you just want to transfer the "
            "data, call detach() on the tensor before serializing (e.g., putting it on the queue)."
        )


def _reduce_tensor(reduce, tensor):
    if is_ours(tensor.device) and tensor.is_quantized:
        return tensor._reduce_ex_internal(2)  # with the quantizer; PyTorch's would drop it
    if not _is_plain(tensor):
        return reduce(tensor)
    _refuse_non_leaf(tensor)
    torch.utils.hooks.warn_if_has_hooks(tensor)
    storage = tensor._typed_storage()
    device, handle, nbytes, offset, *rest = _share(storage._untyped_storage)
    arguments = (
        type(tensor),
        tensor.size(),
        tensor.stride(),
        tensor.storage_offset(),
        type(storage),
        tensor.dtype,
        device,
        handle,
        nbytes,
        offset,
        tensor.requires_grad,
        *rest,
    )
    if lazy := torch._utils.get_tensor_metadata(tensor):
        return rebuild_lazy_tensor, (lazy, *arguments)
    return rebuild_tensor, arguments


# ---- Events ----


def event_handle(moment):
    """The bytes by which another process opens an event."""
    file = moment[:_ID]
    return moment + _server.start() + _origins.get(file, b"")


def open_event(handle):
    """The event's own bytes, with its file open here."""
    moment, addresses = handle[:_MOMENT], handle[_MOMENT:]
    _fetch(moment[:_ID], _addresses(addresses))
    _C._ipc_event_query(moment)  # raises if it has been destroyed
    return moment


# ---- Queues ----


class _Sent:
    """An object that a queue's own thread pickles on the streams of the thread that put it."""

    def __init__(self, value, streams):
        self.value = value
        self.streams = streams

    def __reduce__(self):
        with contextlib.ExitStack() as stack:
            for stream in self.streams:
                stack.enter_context(stream)
            return (ForkingPickler.loads, (bytes(ForkingPickler.dumps(self.value)),))


def _streams_of_caller():
    """The calling thread's current streams, where they are not the default ones."""
    streams = []
    if _C._in_forked_child():  # it has none
        return streams
    for index in range(_C._device_count()):
        if _C._is_active(index):
            stream = torch.accelerator.current_stream(index)
            if stream.stream_id:
                streams.append(stream)
    return streams


def _put(put, queue, obj, *args, **kwargs):
    streams = _streams_of_caller()
    return put(queue, _Sent(obj, streams) if streams else obj, *args, **kwargs)


# ---- Installation ----


def _shares_cuda(original, storage, *args, **kwargs):
    return _share(storage) if is_ours(storage.device) else original(storage, *args, **kwargs)


def _release_counter(description, offset):
    """For a description that is not imported, because this process has the storage."""
    if description:
        _lazy_init()
        _C._ipc_receive(description)


def install():
    wrap("torch.UntypedStorage._share_cuda_", _shares_cuda)
    wrap("torch.UntypedStorage.is_shared", lambda theirs, s: is_ours(s.device) or theirs(s))
    replace("torch.UntypedStorage._new_shared_cuda", staticmethod(_rebuild))
    replace("torch.UntypedStorage._release_ipc_counter_cuda", staticmethod(_release_counter))
    wrap("torch.multiprocessing.reductions.reduce_tensor", _reduce_tensor)
    wrap("torch.multiprocessing.reductions.reduce_storage", _reduce_storage)
    reduced = {reductions.reduce_tensor.__wrapped__: reductions.reduce_tensor}
    reduced[reductions.reduce_storage.__wrapped__] = reductions.reduce_storage
    reducers = ForkingPickler._extra_reducers
    for kind, reduce in list(reducers.items()):
        if reduce in reduced:
            ForkingPickler.register(kind, reduced[reduce])
    _lazy_call(_watch_queues)
    _lazy_call(_transit.install)


def _watch_queues():
    import multiprocessing.queues

    queue = multiprocessing.queues.Queue
    queue.put = wrapped(queue.put, _put)
