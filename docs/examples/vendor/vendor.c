/*
 * A vendor's device as a plugin: a device factory for "openreg" with priority 100, which replaces
 * the simulated one when OPENREG_PLUGIN names this library.
 *
 * The "cards" here are memory of this process that the host cannot reach under the addresses that
 * it is given: a window of addresses without any access stands for a card's memory, and the bytes
 * live elsewhere, in `storage`. A real driver has the same three things: addresses, a copy engine,
 * a way to start kernels. Which function a real one replaces is said at each.
 *
 * Built twice: as it is, with `map` (kernels that the CPU runs can reach the card's memory), and
 * with VENDOR_NO_MAP, without (they cannot: the framework copies to the host and back).
 *
 * Who guards what: a card's blocks and `used` are under its lock; the queue of the copy engine
 * under engineLock; everything else is written before a second thread can see it.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "openreg.h"

static const size_t CARD_MEMORY = (size_t)1 << 30;
/* More addresses than memory, so that holes between blocks cost addresses only. */
static const size_t WINDOW_SIZE = (size_t)4 << 30;

/* A live allocation; a card's are in the order of their addresses. */
typedef struct Block {
  size_t offset, size;
  struct Block *next;
} Block;

typedef struct Card {
  pthread_mutex_t lock;
  char *window;  /* what the host is given: no access, any touch faults */
  char *storage; /* where the bytes are, at the same offsets */
  Block *blocks;
  size_t used;
} Card;

static Card cards[OPENREG_MAX_DEVICES];

/* ---- Memory ---- */

/* Not before the first allocation: a process that only asks how many devices there are maps
 * nothing. A forked child has no business with the card. */
static void mapCard(Card *card) {
  void *window =
      mmap(NULL, WINDOW_SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  void *storage = mmap(NULL, WINDOW_SIZE, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (window == MAP_FAILED || storage == MAP_FAILED) return;
  madvise(storage, WINDOW_SIZE, MADV_DONTFORK);
  card->storage = storage;
  __atomic_store_n(&card->window, (char *)window, __ATOMIC_RELEASE);
}

/* The system's, which are not 4 KiB everywhere. */
static size_t wholePages(size_t bytes) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  return (bytes + page - 1) / page * page;
}

/* Under the card's lock: the place of the first hole of `size` bytes. */
static Block **findHole(Card *card, size_t size, size_t *offset) {
  Block **link = &card->blocks;
  size_t end = 0;
  while (*link && (*link)->offset - end < size) {
    end = (*link)->offset + (*link)->size;
    link = &(*link)->next;
  }
  *offset = end;
  return *link || WINDOW_SIZE - end >= size ? link : NULL;
}

static orError_t takeBlock(Card *card, size_t size, Block *block) {
  if (size > CARD_MEMORY - card->used) return orErrorMemoryAllocation;
  Block **link = findHole(card, size, &block->offset);
  if (!link) return orErrorMemoryAllocation;
  block->size = size;
  block->next = *link;
  *link = block;
  card->used += size;
  return orSuccess;
}

/* A driver: its memory allocator. The address is never read by the host; it only has to be
 * unique. */
static orError_t vendorAlloc(void *device, size_t bytes, void **ptr) {
  Card *card = device;
  *ptr = NULL;
  if (bytes == 0) return orSuccess;
  if (bytes > CARD_MEMORY) return orErrorMemoryAllocation;
  pthread_mutex_lock(&card->lock);
  if (!card->window) mapCard(card);
  Block *block = card->window ? malloc(sizeof(*block)) : NULL;
  size_t size = wholePages(bytes);
  orError_t error = block ? takeBlock(card, size, block) : orErrorMemoryAllocation;
  if (error)
    free(block);
  else
    *ptr = card->window + block->offset;
  pthread_mutex_unlock(&card->lock);
  return error;
}

static orError_t vendorFree(void *device, void *ptr, size_t bytes) {
  (void)bytes;
  Card *card = device;
  if (!ptr) return orSuccess;
  size_t offset = (size_t)((char *)ptr - card->window);
  pthread_mutex_lock(&card->lock);
  Block **link = &card->blocks;
  while (*link && (*link)->offset != offset) link = &(*link)->next;
  Block *block = *link;
  if (block) {
    *link = block->next;
    card->used -= block->size;
    /* Gives the pages back; the next owner finds zeros. */
    madvise(card->storage + offset, block->size, MADV_DONTNEED);
  }
  pthread_mutex_unlock(&card->lock);
  free(block);
  return block ? orSuccess : orErrorInvalidValue;
}

/* The storage behind a range of any card, or null: then it is host memory. */
static char *storageOf(const void *ptr, size_t bytes) {
  for (int i = 0; i < OPENREG_MAX_DEVICES; ++i) {
    char *window = __atomic_load_n(&cards[i].window, __ATOMIC_ACQUIRE);
    if (!window) continue;
    size_t offset = (size_t)((const char *)ptr - window);
    if (offset < WINDOW_SIZE && bytes <= WINDOW_SIZE - offset) return cards[i].storage + offset;
  }
  return NULL;
}

/* ---- The copy engine: a thread with a queue ---- */

typedef struct Job {
  char *dst;
  const char *src;
  size_t bytes;
  orEvent_t done;
  struct Job *next;
} Job;

static pthread_mutex_t engineLock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t engineWork = PTHREAD_COND_INITIALIZER;
static Job *firstJob, **lastJob = &firstJob;
static int engineRuns;

static Job *nextJob(void) {
  pthread_mutex_lock(&engineLock);
  while (!firstJob) pthread_cond_wait(&engineWork, &engineLock);
  Job *job = firstJob;
  firstJob = job->next;
  if (!firstJob) lastJob = &firstJob;
  pthread_mutex_unlock(&engineLock);
  return job;
}

/* The event is signalled when the last byte is in its place, not before: the stream goes on at
 * once. A driver whose card is gone signals orErrorDeviceLost, for all that it has started. */
static void *runEngine(void *unused) {
  (void)unused;
  for (;;) {
    Job *job = nextJob();
    memmove(job->dst, job->src, job->bytes);
    orEvent_t done = job->done;
    free(job);
    orEventSignal(done, orSuccess);
  }
  return NULL;
}

/* engineLock held. At the first copy, not when the plugin is loaded: a process may be loaded with
 * it and never use a device. */
static int startEngine(void) {
  pthread_t thread;
  if (!engineRuns && !pthread_create(&thread, NULL, runEngine, NULL)) {
    pthread_detach(thread);
    engineRuns = 1;
  }
  return engineRuns;
}

static orError_t queueJob(Job *job) {
  pthread_mutex_lock(&engineLock);
  int runs = startEngine();
  if (runs) {
    *lastJob = job;
    lastJob = &job->next;
    pthread_cond_signal(&engineWork);
  }
  pthread_mutex_unlock(&engineLock);
  if (runs) return orErrorNotReady; /* completes later */
  free(job);
  return orErrorSystem;
}

/* A driver: a descriptor for its DMA engine; `done` is signalled from the interrupt's handler. The
 * other end may be host memory or another of the cards. */
static orError_t vendorCopy(void *device, void *dst, const void *src, size_t bytes,
                            orMemcpyKind kind, orEvent_t done) {
  (void)device;
  char *to = storageOf(dst, bytes), *from = storageOf(src, bytes);
  if (!to && kind != orMemcpyDeviceToHost) return orErrorInvalidValue;
  if (!from && kind != orMemcpyHostToDevice) return orErrorInvalidValue;
  Job *job = malloc(sizeof(*job));
  if (!job) return orErrorSystem;
  *job = (Job){to ? to : dst, from ? from : src, bytes, done, NULL};
  return queueJob(job);
}

/* Short work may also be finished before the return: then `done` is left alone. */
static orError_t vendorSet(void *device, void *dst, int value, size_t bytes, orEvent_t done) {
  (void)device, (void)done;
  char *to = storageOf(dst, bytes);
  if (!to) return orErrorInvalidValue;
  memset(to, value, bytes);
  return orSuccess;
}

/* ---- Kernels ---- */

/* A driver: a launch on its hardware queue, completed as copies are. A kernel written for the CPU
 * runs where it is called, which keeps the number of threads it may use in the hands of the
 * caller. */
static orError_t vendorCompute(void *device, const orKernel *kernel, orEvent_t done) {
  (void)device, (void)done;
  return kernel->fn(kernel->args);
}

#ifndef VENDOR_NO_MAP
/* A driver: the card's memory as seen through its bus window. Left out where there is none. */
static orError_t vendorMap(void *device, const void *ptr, size_t bytes, void **address) {
  (void)device;
  *address = storageOf(ptr, bytes);
  return *address ? orSuccess : orErrorInvalidValue;
}
#endif

/* ---- The factory ---- */

/* A driver: finds its cards, and fails if there are fewer than `count`. */
static orError_t createCards(const orDeviceConfig *config, int count, orDeviceDesc *devices) {
  (void)config;
  for (int i = 0; i < count; ++i) {
    pthread_mutex_init(&cards[i].lock, NULL);
    devices[i].memory_limit = CARD_MEMORY;
    devices[i].numa_node = 0;
    devices[i].self = &cards[i];
  }
  return orSuccess;
}

static const orDeviceFactory factory = {
    .size = sizeof(orDeviceFactory),
    .abi_version = OPENREG_ABI_VERSION,
    .create_devices = createCards,
    .alloc = vendorAlloc,
    .free = vendorFree,
    .copy = vendorCopy,
    .set = vendorSet,
    .compute = vendorCompute,
#ifdef VENDOR_NO_MAP
    .name = "example vendor, memory not mapped",
#else
    .name = "example vendor",
    .map = vendorMap,
#endif
};

OR_API orError_t orPluginInit(void) { return orRegisterDeviceFactory("openreg", 100, &factory); }
