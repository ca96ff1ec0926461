/*
 * Memory and events of two processes: who sees what, in which order, and what is left when one of
 * them ends.
 */
#include "openreg_ipc.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cache_helpers.h"

/* ---- Two processes with a socket between them ---- */

typedef struct Peer {
  int socket;
  pid_t pid;
} Peer;

/* Forks before any device is used. In the child `body` runs, and then it ends. */
static Peer startPeer(void (*body)(int socket)) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  pid_t pid = fork();
  ASSERT_GE(pid, 0);
  if (!pid) {
    close(ends[0]);
    body(ends[1]);
    fflush(stdout);
    _exit(0);
  }
  close(ends[1]);
  return (Peer){ends[0], pid};
}

static void endPeer(Peer peer, int signal) {
  int status = 0;
  if (signal) kill(peer.pid, signal);
  close(peer.socket);
  ASSERT_EQ(waitpid(peer.pid, &status, 0), peer.pid);
  if (signal)
    ASSERT_EQ(WTERMSIG(status), signal);
  else
    ASSERT_EQ(status, 0);
}

static void sendBytes(int socket, const void *from, size_t bytes) {
  ASSERT_EQ(send(socket, from, bytes, MSG_NOSIGNAL), (ssize_t)bytes);
}

static void receiveBytes(int socket, void *to, size_t bytes) {
  ASSERT_EQ(recv(socket, to, bytes, MSG_WAITALL), (ssize_t)bytes);
}

static void sendFile(int socket, const orIpcId *id) {
  int fd;
  ASSERT_OK(orIpcFile(&fd, id));
  char control[CMSG_SPACE(sizeof fd)] = {0};
  struct iovec io = {(void *)(uintptr_t)id, sizeof *id};
  struct msghdr m = {
      .msg_iov = &io, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
  struct cmsghdr *c = CMSG_FIRSTHDR(&m);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(sizeof fd);
  memcpy(CMSG_DATA(c), &fd, sizeof fd);
  ASSERT_EQ(sendmsg(socket, &m, 0), (ssize_t)sizeof *id);
}

static int receiveDescriptor(int socket, orIpcId *id) {
  int fd;
  char control[CMSG_SPACE(sizeof fd)];
  struct iovec io = {id, sizeof *id};
  struct msghdr m = {
      .msg_iov = &io, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
  ASSERT_EQ(recvmsg(socket, &m, 0), (ssize_t)sizeof *id);
  ASSERT(CMSG_FIRSTHDR(&m) != NULL);
  memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
  return fd;
}

static void receiveFile(int socket) {
  orIpcId id;
  int fd = receiveDescriptor(socket, &id);
  ASSERT_OK(orIpcAddFile(&id, fd));
  close(fd);
}

static orIpcMemory export(void *ptr, size_t bytes, orStream_t stream) {
  orIpcMemory m = {.size = sizeof m};
  ASSERT_OK(orIpcExport(&m, ptr, bytes, stream));
  return m;
}

static void sendMemory(int socket, const orIpcMemory *m) {
  sendBytes(socket, m, sizeof *m);
  sendFile(socket, &m->file);
  if (m->ready.record) sendFile(socket, &m->ready.file);
}

static void *receiveMemory(int socket, orIpcMemory *m, orStream_t stream) {
  void *ptr;
  receiveBytes(socket, m, sizeof *m);
  receiveFile(socket);
  if (m->ready.record) receiveFile(socket);
  ASSERT_OK(orIpcImport(&ptr, m, stream));
  return ptr;
}

static void step(int socket) { sendBytes(socket, "+", 1); }
static void awaitStep(int socket) {
  char c;
  receiveBytes(socket, &c, 1);
}

static void awaitEnd(int socket) {
  char c;
  while (recv(socket, &c, 1, 0) > 0) continue;
}

static int byteAt(const void *ptr, orStream_t stream) {
  unsigned char c = 0;
  ASSERT_OK(orMemcpyWithStream(&c, ptr, 1, orMemcpyDefault, stream));
  return c;
}

static orIpcStats ipcStats(void) {
  orIpcStats stats = {.size = sizeof stats};
  ASSERT_OK(orIpcGetStats(&stats));
  return stats;
}

static size_t pendingAfterCollect(void) {
  ASSERT_OK(orIpcCollect());
  return ipcStats().pending;
}

/* ---- Memory ---- */

/* Reads, writes, and waits to be ended. */
static void readAndWrite(int socket) {
  orStream_t s = defaultStream(0);
  orIpcMemory m;
  char *ptr = receiveMemory(socket, &m, s);
  ASSERT_EQ(byteAt(ptr, s), 3);
  ASSERT_OK(orMemsetAsync(ptr, 4, 1, s));
  ASSERT_OK(orStreamSynchronize(s));
  size_t free_bytes, total;
  ASSERT_OK(orMemGetInfo(&free_bytes, &total));
  ASSERT_EQ(free_bytes, total); /* charged to its owner alone */
  ASSERT_REFUSED(orFree((void *)((uintptr_t)ptr & ~(uintptr_t)(2 * MIB - 1))), orErrorInvalidValue,
                 "");
  ASSERT_OK(orCacheRecordStream(ptr, s));
  step(socket);
  awaitStep(socket);
  ASSERT_OK(orIpcRelease(ptr));
  ASSERT_REFUSED(orIpcRelease(ptr), orErrorInvalidValue, "not imported");
  step(socket);
  awaitStep(socket);
}

TEST(ipc_block_is_shared_and_stays_pending_until_it_is_released) {
  Peer peer = startPeer(readAndWrite);
  orStream_t s = defaultStream(0);
  char *ptr = take(4 * KIB, s);
  ASSERT_OK(orMemsetAsync(ptr, 3, 4 * KIB, s));
  orIpcMemory m = export(ptr, 4 * KIB, s);
  sendMemory(peer.socket, &m);
  awaitStep(peer.socket);
  ASSERT_EQ(byteAt(ptr, s), 4);
  ASSERT_OK(orCacheFree(ptr));
  ASSERT_EQ(pendingAfterCollect(), 1);
  ASSERT_EQ(statsOf(0).active[0].current, 1);
  ASSERT_EQ(statsOf(0).allocation[0].current, 0);
  void *other = take(4 * KIB, s);
  ASSERT(other != ptr);
  step(peer.socket);
  awaitStep(peer.socket);
  ASSERT_EQ(pendingAfterCollect(), 0);
  ASSERT_PTR(take(4 * KIB, s), ptr);
  endPeer(peer, SIGKILL);
}

TEST(ipc_description_in_transit_holds_its_block) {
  orStream_t s = defaultStream(0);
  char *ptr = take(512, s);
  void *again;
  orIpcMemory m = export(ptr, 512, s);
  ASSERT_OK(orCacheFree(ptr));
  ASSERT_EQ(pendingAfterCollect(), 1);
  ASSERT_OK(orIpcImport(&again, &m, s)); /* it came back */
  ASSERT_PTR(again, ptr);
  ASSERT_EQ(pendingAfterCollect(), 1);
  ASSERT_OK(orIpcRelease(again));
  ASSERT_EQ(pendingAfterCollect(), 0);
  ASSERT_REFUSED(orIpcImport(&again, &m, s), orErrorInvalidResourceHandle, "freed by its owner");
  ASSERT_EQ(ipcStats().holds, 0);
}

static void holdForEver(int socket) {
  orIpcMemory m;
  receiveMemory(socket, &m, defaultStream(0));
  if (!fork()) { /* lives on, with what it inherits, until the test closes its last socket */
    step(socket);
    awaitEnd(socket);
    _exit(0);
  }
  awaitEnd(socket);
}

TEST(ipc_killed_receiver_holds_nothing_though_it_has_forked) {
  Peer peer = startPeer(holdForEver);
  orStream_t s = defaultStream(0);
  char *ptr = take(512, s);
  orIpcMemory m = export(ptr, 512, s);
  sendMemory(peer.socket, &m);
  ASSERT_OK(orCacheFree(ptr));
  awaitStep(peer.socket);
  ASSERT_EQ(pendingAfterCollect(), 1);
  int kept = dup(peer.socket);
  endPeer(peer, SIGKILL);
  ASSERT_EQ(pendingAfterCollect(), 0);
  close(kept);
}

/* Sends on what it has received and releases it; asked, it counts what it has sent on as lost. */
static void relay(int socket) {
  orStream_t s = defaultStream(0);
  orIpcMemory m;
  size_t count;
  void *ptr = receiveMemory(socket, &m, s);
  m = export(ptr, 512, s);
  ASSERT_EQ(m.relayed, 1);
  ASSERT_OK(orIpcRelease(ptr));
  ASSERT_OK(orIpcTransit(&count, &m, SIZE_MAX));
  ASSERT_EQ(count, 1);
  ASSERT_EQ(ipcStats().holds, 1);
  sendBytes(socket, &m, sizeof m);
  awaitStep(socket);
  ASSERT_OK(orIpcTransit(&count, &m, 0));
  ASSERT_EQ(count, 0);
  ASSERT_EQ(ipcStats().holds, 0);
  step(socket);
  awaitEnd(socket);
}

TEST(ipc_relayed_description_holds_its_block_while_the_relay_lives) {
  Peer killed = startPeer(relay), peer = startPeer(relay);
  orStream_t s = defaultStream(0);
  Peer peers[] = {killed, peer};
  orIpcMemory m;
  void *again;
  for (int i = 0; i < 2; i++) {
    char *ptr = take(512, s);
    m = export(ptr, 512, s);
    sendMemory(peers[i].socket, &m);
    ASSERT_OK(orCacheFree(ptr));
    receiveBytes(peers[i].socket, &m, sizeof m);
    ASSERT_EQ(pendingAfterCollect(), 1);
    if (i) step(peer.socket), awaitStep(peer.socket);
    if (!i) endPeer(killed, SIGKILL);
    ASSERT_EQ(pendingAfterCollect(), 0);
    ASSERT_REFUSED(orIpcImport(&again, &m, s), orErrorInvalidResourceHandle, "freed by its owner");
  }
  endPeer(peer, SIGKILL);
}

TEST(ipc_description_that_is_lost_holds_nothing) {
  orStream_t s = defaultStream(0);
  char *ptr = take(512, s);
  size_t count;
  orIpcMemory m = export(ptr, 512, s), other = export(ptr, 256, s);
  ASSERT_OK(orIpcTransit(&count, &m, SIZE_MAX));
  ASSERT_EQ(count, 2);
  ASSERT_OK(orIpcTransit(&count, &other, 1));
  ASSERT_EQ(count, 1);
  ASSERT_OK(orCacheFree(ptr));
  ASSERT_EQ(pendingAfterCollect(), 1);
  ASSERT_OK(orIpcTransit(&count, &m, 0));
  ASSERT_EQ(pendingAfterCollect(), 0);
  ASSERT_PTR(take(512, s), ptr);
  orIpcMemory newer = export(ptr, 512, s);
  ASSERT_OK(orIpcTransit(&count, &m, 0)); /* of the block before */
  ASSERT_OK(orIpcTransit(&count, &newer, 1));
  ASSERT_EQ(count, 1);
}

/* The sender: its stream is held when it sends. */
static void sendWhileHeld(int socket) {
  orStream_t s = defaultStream(0);
  char *ptr = take(1 * MIB, s);
  ASSERT_OK(orMemsetAsync(ptr, 1, MIB, s));
  ASSERT_OK(orStreamSynchronize(s));
  orEvent_t gate = closeGate(s);
  ASSERT_OK(orMemsetAsync(ptr, 2, MIB, s));
  orIpcMemory m = export(ptr, MIB, s);
  ASSERT_NE(m.ready.record, 0);
  sendMemory(socket, &m);
  awaitStep(socket);
  openGate(gate, s);
  awaitStep(socket);
}

TEST(ipc_receiver_waits_in_its_stream_for_the_senders_work) {
  Peer peer = startPeer(sendWhileHeld);
  orStream_t s = defaultStream(0);
  orIpcMemory m;
  unsigned char *pinned;
  ASSERT_OK(orMallocHost((void **)&pinned, 1));
  void *ptr = receiveMemory(peer.socket, &m, s);
  ASSERT_OK(orMemcpyAsync(pinned, ptr, 1, orMemcpyDefault, s));
  ASSERT_EQ(orStreamQuery(s), orErrorNotReady);
  ASSERT_EQ(byteAt(ptr, newStream()), 1); /* another stream is not ordered */
  step(peer.socket);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(*pinned, 2);
  endPeer(peer, SIGKILL);
  ASSERT_EQ(byteAt(ptr, s), 2); /* the memory outlives its owner */
  ASSERT_OK(orIpcRelease(ptr));
  ASSERT_OK(orIpcCollect());
  ASSERT_EQ(ipcStats().files, 0);
}

TEST(ipc_wait_for_a_process_that_ends_is_an_error_and_no_hang) {
  Peer peer = startPeer(sendWhileHeld);
  orStream_t s = defaultStream(0);
  orIpcMemory m;
  receiveMemory(peer.socket, &m, s);
  ASSERT_EQ(orStreamQuery(s), orErrorNotReady);
  endPeer(peer, SIGKILL);
  ASSERT_REFUSED(orStreamSynchronize(s), orErrorSystem, "ended before its work was done");
  ASSERT_OK(orStreamSynchronize(s));
}

TEST(ipc_release_waits_for_work_that_is_queued) {
  orStream_t s = newStream();
  char *ptr = take(512, defaultStream(0));
  void *again;
  orIpcMemory m = export(ptr, 512, s);
  ASSERT_OK(orIpcImport(&again, &m, s));
  ASSERT_OK(orCacheFree(ptr));
  orEvent_t gate = closeGate(s);
  ASSERT_OK(orMemsetAsync(again, 1, 512, s));
  ASSERT_OK(orIpcRelease(again));
  ASSERT_EQ(pendingAfterCollect(), 1);
  openGate(gate, s);
  ASSERT_EQ(pendingAfterCollect(), 0);
}

/* ---- What is forged, old or too much ---- */

TEST(ipc_forged_description_is_refused) {
  orStream_t s = defaultStream(0);
  orIpcMemory good = export(take(512, s), 512, s), m;
  void *ptr;
#define REFUSED(change, error, text)                     \
  m = good;                                              \
  change;                                                \
  ASSERT_REFUSED(orIpcImport(&ptr, &m, s), error, text); \
  ASSERT_PTR(ptr, NULL)
  REFUSED(m.size = 8, orErrorInvalidValue, "size");
  REFUSED(m.version++, orErrorInvalidValue, "version");
  REFUSED(m.device = 2, orErrorInvalidDevice, "OPENREG_DEVICE_COUNT");
  REFUSED(m.device = 1, orErrorInvalidValue, "match");
  REFUSED(m.file.bits[0]++, orErrorNotFound, "not open");
  REFUSED(m.file_bytes *= 2, orErrorInvalidValue, "match");
  REFUSED(m.block++, orErrorInvalidValue, "outside");
  REFUSED(m.offset = UINT64_MAX, orErrorInvalidValue, "outside");
  REFUSED(m.bytes = UINT64_MAX, orErrorInvalidValue, "outside");
  REFUSED(m.bytes = 513, orErrorInvalidValue, "past the end");
  REFUSED(m.generation++, orErrorInvalidResourceHandle, "freed");
  REFUSED((m.ready = (orIpcMoment){.record = 1}), orErrorNotFound, "events");
  ASSERT_EQ(ipcStats().holds, 0);
}

TEST(ipc_file_that_can_shrink_is_refused) {
  int devices;
  ASSERT_OK(orGetDeviceCount(&devices));
  FILE *f = tmpfile();
  ASSERT(f != NULL);
  ASSERT_REFUSED(orIpcAddFile(&(orIpcId){{1, 2}}, fileno(f)), orErrorInvalidValue, "sealed");
}

TEST(ipc_memory_that_is_not_the_caches_is_refused) {
  void *ptr;
  orIpcMemory m = {.size = sizeof m};
  ASSERT_OK(orMalloc(&ptr, 512));
  ASSERT_REFUSED(orIpcExport(&m, ptr, 512, 0), orErrorNotSupported, "caching allocator");
  ASSERT_REFUSED(orIpcExport(&m, &m, 512, 0), orErrorInvalidValue, "not memory of a device");
}

TEST(ipc_segments_past_the_limit_of_files_work_and_name_it) {
  struct rlimit limit = {64, 64};
  orIpcMemory m = {.size = sizeof m};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  orStream_t s = defaultStream(0);
  void *first = take(2 * MIB, s), *last = first;
  for (int i = 0; i < 80; i++) last = take(MIB, s); /* two in a segment */
  orEvent_t gate = closeGate(s);
  orIpcMemory held = export(first, 1, s);
  ASSERT_NE(held.ready.record, 0); /* the file of events is beyond the limit */
  openGate(gate, s);
  ASSERT_REFUSED(orIpcExport(&m, last, 1, s), orErrorSystem, "ulimit -n");
  ASSERT_OK(orMemsetAsync(last, 9, 1, s));
  ASSERT_EQ(byteAt(last, s), 9);
  ASSERT_OK(orIpcImport(&last, &held, s));
  ASSERT_PTR(last, first);
}

/* ---- Events ---- */

static void recordWhenAsked(int socket) {
  orStream_t s = defaultStream(0);
  orIpcMoment event;
  receiveBytes(socket, &event, sizeof event);
  receiveFile(socket);
  orEvent_t gate = closeGate(s);
  ASSERT_OK(orIpcEventRecord(&event, s));
  step(socket);
  awaitStep(socket);
  openGate(gate, s);
  step(socket);
  awaitStep(socket);
  ASSERT_OK(orIpcEventNewest(&event));
  ASSERT_REFUSED(orIpcEventDestroy(&event), orErrorInvalidValue, "created");
}

TEST(ipc_event_is_recorded_by_one_process_and_awaited_by_another) {
  Peer peer = startPeer(recordWhenAsked);
  orStream_t s = defaultStream(0);
  orIpcMoment event, moment;
  orEvent_t local;
  ASSERT_OK(orIpcEventCreate(&event));
  ASSERT_OK(orIpcEventQuery(&event)); /* never recorded */
  sendBytes(peer.socket, &event, sizeof event);
  sendFile(peer.socket, &event.file);
  awaitStep(peer.socket);
  moment = event;
  ASSERT_OK(orIpcEventNewest(&moment));
  ASSERT_EQ(moment.record, 1);
  ASSERT_EQ(orIpcEventQuery(&moment), orErrorNotReady);
  ASSERT_OK(orIpcEventWait(&moment, s));
  ASSERT_OK(orIpcEventLocal(&local, &moment, 0));
  ASSERT_EQ(orStreamQuery(s), orErrorNotReady);
  step(peer.socket);
  ASSERT_OK(orEventSynchronize(local));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(orIpcEventQuery(&moment));
  awaitStep(peer.socket);
  ASSERT_OK(orEventDestroy(local));
  step(peer.socket);
  endPeer(peer, 0);
  ASSERT_OK(orIpcEventDestroy(&event));
  ASSERT_REFUSED(orIpcEventQuery(&moment), orErrorInvalidResourceHandle, "destroyed");
}

TEST(ipc_reset_completes_a_record) {
  orStream_t s = newStream();
  orIpcMoment event;
  ASSERT_OK(orIpcEventCreate(&event));
  orEvent_t gate = closeGate(s);
  ASSERT_OK(orIpcEventRecord(&event, s));
  ASSERT_EQ(orIpcEventQuery(&event), orErrorNotReady);
  ASSERT_OK(orDeviceReset());
  ASSERT_OK(orIpcEventQuery(&event));
  ASSERT_OK(orEventDestroy(gate));
}
