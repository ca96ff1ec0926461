/*
 * Files in memory that processes share.
 *
 * A segment's file has the memory, and behind it what processes agree on through it: an orShare for
 * each unit of the memory, and the head in the last bytes. That part is added and mapped when a
 * block is shared first; the file is then sealed, so that no process can cut it off under another.
 *
 *     memory (mapped over the device's alias)  |  orShare[units]  ...  head
 *
 * A process opens each file itself (/proc/self/fd), as the kernel's locks belong to an open file:
 * they end when the last descriptor and mapping of it are gone. A forked child closes the
 * descriptors that it inherits, else it would keep its parent's locks.
 *
 * `sharing` guards the entries. `opening` guards which entries have a descriptor, under which none
 * is taken; a fork finds it free. An entry's memory belongs to the region that names it.
 */
#include "device/shared_file.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

const uint64_t orSharedSegment = UINT64_C(0x31746e656d676573);
const uint64_t orSharedEvents = UINT64_C(0x3173746e65766573);

static orMutex sharing = OR_MUTEX_INITIALIZER(OR_RANK_SHARING);
static orMutex opening = OR_MUTEX_INITIALIZER(OR_RANK_LEAF);
static orSharedFile files[OR_MOST_SHARED_FILES]; /* [0] is none */
static int used = 1, opened;                     /* under `opening` */
static _Atomic int alive = -1;                   /* the open file that holds byte 0 */

void orSharedLock(void) { orMutexLock(&sharing); }
void orSharedUnlock(void) { orMutexUnlock(&sharing); }

/* ---- descriptors ---- */

static void closeInChild(void) {
  for (int i = 1; i < used; i++)
    if (files[i].descriptor >= 0) close(files[i].descriptor);
  if (alive >= 0) close(alive);
}

__attribute__((constructor)) static void keep(void) {
  orForkKeep(&opening);
  files[0].descriptor = -1;
  pthread_atfork(NULL, NULL, closeInChild);
}

int orSharedFileLimit(void) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur / 2 > OR_MOST_SHARED_FILES - 1)
    return OR_MOST_SHARED_FILES - 1;
  return (int)(limit.rlim_cur / 2);
}

static int freeEntry(void) {
  for (int i = 1; i < used; i++)
    if (files[i].descriptor < 0) return i;
  return used < OR_MOST_SHARED_FILES ? used++ : 0;
}

/* Segments leave a few files for events, without which they could not be sent. */
static int limitFor(const orSharedFile *entry) {
  enum { OR_MOST_EVENT_FILES = 16 };
  return orSharedFileLimit() + (entry->bytes ? 0 : OR_MOST_EVENT_FILES);
}

/* Fills a free entry, which owns the descriptor from here on; null and a closed descriptor if there
 * are too many. */
static orSharedFile *adopt(int descriptor, orSharedFile entry) {
  orMutexLock(&opening);
  int i = opened < limitFor(&entry) ? freeEntry() : 0;
  if (i) {
    files[i] = entry;
    files[i].descriptor = descriptor;
    opened++;
  }
  orMutexUnlock(&opening);
  if (i) return &files[i];
  close(descriptor);
  return NULL;
}

static void closeEntry(orSharedFile *f) {
  if (f->shared) munmap(f->shared, f->shared_bytes);
  orMutexLock(&opening);
  close(f->descriptor);
  *f = (orSharedFile){.descriptor = -1};
  opened--;
  orMutexUnlock(&opening);
}

void orSharedFileClose(orSharedFile *f) { closeEntry(f); }

static orError_t refuseMore(void) {
  return orFail(orErrorSystem,
                "this process may have %d files open for shared memory, half of its limit "
                "(ulimit -n), and has no more",
                orSharedFileLimit());
}

/* An open file of this process alone. */
static int reopen(int descriptor) {
  char path[32];
  snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
  return open(path, O_RDWR | O_CLOEXEC);
}

orSharedFile *orSharedFileAt(int number) { return &files[number]; }
int orSharedFileNumber(const orSharedFile *file) { return (int)(file - files); }

orSharedFile *orSharedFileNext(int number) {
  for (; number < used; number++)
    if (files[number].descriptor >= 0) return &files[number];
  return NULL;
}

orSharedFile *orSharedFileFind(const orIpcId *id) {
  if (!(id->bits[0] | id->bits[1])) return NULL;
  for (orSharedFile *f = files; (f = orSharedFileNext(orSharedFileNumber(f) + 1));)
    if (f->id.bits[0] == id->bits[0] && f->id.bits[1] == id->bits[1] && !f->ending) return f;
  return NULL;
}

/* ---- locks of bytes ---- */

static bool lockByte(int descriptor, short type, uint64_t byte) {
  struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)byte, .l_len = 1};
  return !fcntl(descriptor, F_OFD_SETLK, &lock);
}

bool orSharedByteHold(const orSharedFile *f, uint64_t byte) {
  return lockByte(f->descriptor, F_RDLCK, byte);
}

void orSharedByteDrop(const orSharedFile *f, uint64_t byte) {
  lockByte(f->descriptor, F_UNLCK, byte);
}

/* If the system does not answer, the byte counts as held: memory may be kept, but not reused. */
bool orSharedByteHeld(const orSharedFile *f, uint64_t byte) {
  struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)byte, .l_len = 1};
  return fcntl(f->descriptor, F_OFD_GETLK, &lock) || lock.l_type != F_UNLCK;
}

orError_t orSharedFileMarkAlive(orSharedFile *f) {
  int descriptor = reopen(f->descriptor);
  if (descriptor < 0 || !lockByte(descriptor, F_RDLCK, 0)) {
    int why = errno;
    if (descriptor >= 0) close(descriptor);
    return orFail(orErrorSystem, "cannot lock a file for shared events: %s", strerror(why));
  }
  alive = descriptor;
  return orSuccess;
}

/* ---- the part beside the memory ---- */

static size_t sharedBytes(size_t bytes) {
  size_t units = orWholePages(bytes) / OR_SHARED_UNIT;
  return orWholePages(units * sizeof(orShare) + sizeof(orSharedHead));
}

static bool mapShared(orSharedFile *f, size_t offset, size_t bytes) {
  void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, f->descriptor, (off_t)offset);
  if (at == MAP_FAILED || madvise(at, bytes, MADV_DONTFORK)) return false;
  f->shared = at;
  f->shared_bytes = bytes;
  f->head = (orSharedHead *)(void *)(f->shared + bytes - sizeof(orSharedHead));
  return true;
}

static orError_t failShared(const char *what, size_t bytes) {
  return orFail(orErrorSystem, "cannot %s %zu bytes of shared memory: %s", what, bytes,
                strerror(errno));
}

static bool makeId(orIpcId *id) {
  return getrandom(id, sizeof *id, 0) == (ssize_t)sizeof *id && (id->bits[0] | id->bits[1]);
}

static orError_t publish(orSharedFile *f, uint64_t magic, size_t offset, size_t bytes) {
  orIpcId id;
  if (ftruncate(f->descriptor, (off_t)(offset + bytes)) ||
      fcntl(f->descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) ||
      !makeId(&id) || !mapShared(f, offset, bytes))
    return failShared("add", bytes);
  f->head->magic = magic;
  f->head->version = OPENREG_VERSION;
  f->head->device = f->device;
  f->head->bytes = f->bytes;
  f->head->id = f->id = id;
  return orSuccess;
}

orError_t orSharedFilePublish(orSharedFile *f) {
  return f->shared ? orSuccess
                   : publish(f, orSharedSegment, orWholePages(f->bytes), sharedBytes(f->bytes));
}

orError_t orSharedFileCreate(uint64_t magic, size_t bytes, orSharedFile **file) {
  bytes = orWholePages(bytes + sizeof(orSharedHead));
  int descriptor = orMemoryFile("openreg shared", bytes);
  if (descriptor < 0) return failShared("make", bytes);
  if (!(*file = adopt(descriptor, (orSharedFile){.device = -1}))) return refuseMore();
  orError_t error = publish(*file, magic, 0, bytes);
  if (error) closeEntry(*file);
  return error;
}

/* ---- files of other processes ---- */

static orError_t refuseFile(const char *why) {
  return orFail(orErrorInvalidValue, "the file that another process has sent %s", why);
}

static orError_t checkHead(const orIpcId *id, const orSharedHead *head, size_t size) {
  bool segment = head->magic == orSharedSegment;
  if (!segment && head->magic != orSharedEvents) return refuseFile("is not of shared memory");
  if (head->version != OPENREG_VERSION)
    return orFail(orErrorInvalidValue,
                  "the other process has version %u.%u.%u of openreg, this one %s",
                  head->version / 10000, head->version / 100 % 100, head->version % 100,
                  OPENREG_VERSION_STRING);
  if (memcmp(&head->id, id, sizeof *id)) return refuseFile("is not the one that was named");
  if (segment && (!head->bytes || head->bytes > OR_MOST_MEMORY ||
                  orWholePages(head->bytes) + sharedBytes(head->bytes) != size))
    return refuseFile("has not the size of its memory");
  return orSuccess;
}

static orError_t readHead(const orIpcId *id, int descriptor, orSharedHead *head, size_t *size) {
  struct stat status;
  int seals = fcntl(descriptor, F_GET_SEALS);
  if (fstat(descriptor, &status) || seals < 0 || !(seals & F_SEAL_SHRINK))
    return refuseFile("can be cut off: it is not sealed");
  *size = (size_t)status.st_size;
  if (*size < orPageSize() ||
      pread(descriptor, head, sizeof *head, (off_t)(*size - sizeof *head)) != (ssize_t)sizeof *head)
    return refuseFile("is too short");
  return checkHead(id, head, *size);
}

orError_t orSharedFileOpen(const orIpcId *id, int descriptor, orSharedFile **file) {
  orSharedHead head = {0};
  size_t size = 0;
  OR_TRY(readHead(id, descriptor, &head, &size));
  int own = reopen(descriptor);
  if (own < 0) return failShared("open", size);
  bool segment = head.magic == orSharedSegment;
  size_t offset = segment ? orWholePages(head.bytes) : 0;
  orSharedFile *f = adopt(own, (orSharedFile){.bytes = segment ? head.bytes : 0,
                                              .device = head.device,
                                              .imported = true,
                                              .ending = true});
  if (!f) return refuseMore();
  if (!mapShared(f, offset, size - offset)) {
    closeEntry(f);
    return failShared("map", size);
  }
  f->id = *id;
  f->ending = false;
  *file = f;
  return orSuccess;
}

/* ---- memory of segments ---- */

int orSharedFileMake(int device, void *base, size_t bytes) {
  int descriptor = orMemoryFile("openreg", orWholePages(bytes));
  if (descriptor < 0) return 0;
  orSharedFile *f =
      adopt(descriptor, (orSharedFile){.base = base, .bytes = bytes, .device = device});
  if (!f) return 0;
  if (orSimulatedMapFile(base, orWholePages(bytes), descriptor)) return orSharedFileNumber(f);
  closeEntry(f);
  return 0;
}

orError_t orSharedFileMap(orSharedFile *f, void *base) {
  if (!orSimulatedMapFile(base, orWholePages(f->bytes), f->descriptor))
    return failShared("map", f->bytes);
  f->base = base;
  return orSuccess;
}

/* An owner's pages go back even if another process still has the idle segment mapped. */
bool orSharedFileEnd(int number) {
  orSharedFile *f = &files[number];
  orMutexLock(&sharing);
  if (!f->imported && f->head) {
    atomic_store(&f->head->gone, 1);
    orSimulatedPunch(f->base, orWholePages(f->bytes));
  }
  bool unmapped = orSimulatedMapFile(f->base, orWholePages(f->bytes), -1);
  closeEntry(f);
  orMutexUnlock(&sharing);
  return unmapped;
}
