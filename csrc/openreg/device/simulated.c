/*
 * The simulated device: its memory, and how tasks reach it.
 *
 * One reservation holds, for each device, two mappings of equal size (a power of two) side by side,
 * and behind all of them each device's table of pages:
 *
 *     range   PROT_NONE           what orMalloc returns; a host access always faults
 *     alias   the pages, a memfd  what kernels and copies use: range address + span
 *             (over them, the file of each segment that may be shared: shared_file.c)
 *
 * A kernel needs no system call for access, and at no moment can the host read by mistake. The
 * alias is MADV_DONTFORK: a forked child cannot write its parent's device memory. The reservation
 * is MADV_DONTDUMP: the kernel would read, and so allocate, every page that it writes to a core
 * file.
 *
 * Addresses come from a buddy allocator. The capacity is charged elsewhere (region.c), so the range
 * must never be the reason for a failure. A buddy system that serves at most M live bytes, in
 * blocks of at most n pages, needs at most M * (1 + log2(n) / 2) bytes of addresses (Robson's bound
 * for such systems); sizes are rounded up to a power of two, which doubles M. With n <= 2^28 pages
 * that is below 32 * M, the range's size. Freed pages are punched out of the memfd (MADV_REMOVE)
 * with no lock held. Pages are the system's (pages.c).
 *
 * `mapping` guards the one-time mapping; `arena` is published last. A card's `lock` guards its free
 * lists and `buddy`.
 */
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "device/device.h"

enum { OR_ORDERS = 44, OR_RANGE_ORDER = 5 /* the range is 32 times the capacity */ };
_Static_assert(OR_MOST_MEMORY / 4096 << OR_RANGE_ORDER == (size_t)1 << (OR_ORDERS - 1),
               "a range of the largest capacity, in the smallest pages, is one buddy");

/* One entry a page. Only that of a buddy's first page is used, so that few are ever touched. A
 * range may have more than 2^32 pages. */
typedef struct orBuddy {
  uint64_t next : 48, order : 8; /* free: next and previous page + 1 in the list of its order; */
  uint64_t previous : 48, is_free : 1; /* allocated: its bytes (bytesOf) */
} orBuddy;

typedef struct orCard {
  orMutex lock;
  int orders; /* the whole range is one buddy of order orders - 1 */
  int file;   /* of its pages; -1: none */
  orBuddy *buddy;
  size_t free_head[OR_ORDERS];
} orCard;

static orCard cards[OPENREG_MAX_DEVICES];
static int card_count;
static size_t capacity; /* each device's, in bytes */

static orMutex mapping = OR_MUTEX_INITIALIZER(OR_RANK_ARENA);
static size_t span; /* bytes of one range; written before `arena` */
static _Atomic(char *) arena;

static char *rangeOf(const orCard *c) {
  return atomic_load_explicit(&arena, memory_order_acquire) + (size_t)(c - cards) * 2 * span;
}

/* ---- buddies ---- */

static void pushFree(orCard *c, size_t page, int order) {
  orBuddy *b = &c->buddy[page];
  *b = (orBuddy){.next = c->free_head[order], .order = (unsigned)order, .is_free = true};
  if (b->next) c->buddy[b->next - 1].previous = page + 1;
  c->free_head[order] = page + 1;
}

static void unlinkFree(orCard *c, size_t page) {
  orBuddy *b = &c->buddy[page];
  if (b->previous)
    c->buddy[b->previous - 1].next = b->next;
  else
    c->free_head[b->order] = b->next;
  if (b->next) c->buddy[b->next - 1].previous = b->previous;
  b->is_free = false;
}

static bool takePages(orCard *c, int order, size_t *page) {
  int from = order;
  while (from < c->orders && !c->free_head[from]) from++;
  if (from == c->orders) return false;
  *page = c->free_head[from] - 1;
  unlinkFree(c, *page);
  while (from > order) {
    from--;
    pushFree(c, *page + ((size_t)1 << from), from);
  }
  c->buddy[*page] = (orBuddy){.order = (unsigned)order};
  return true;
}

static void givePages(orCard *c, size_t page) {
  int order = (int)c->buddy[page].order;
  while (order + 1 < c->orders) {
    size_t other = page ^ (size_t)1 << order;
    if (!c->buddy[other].is_free || (int)c->buddy[other].order != order) break;
    unlinkFree(c, other);
    if (other < page) page = other;
    order++;
  }
  pushFree(c, page, order);
}

static int orderOf(size_t bytes) {
  size_t pages = orWholePages(bytes) / orPageSize();
  return pages <= 1 ? 0 : 64 - __builtin_clzll(pages - 1);
}

enum { OR_LINK_BITS = 48 };

static void setBytes(orBuddy *b, size_t bytes) {
  b->next = bytes & (((size_t)1 << OR_LINK_BITS) - 1);
  b->previous = bytes >> OR_LINK_BITS;
}

static size_t bytesOf(const orBuddy *b) {
  return b->is_free ? 0 : b->next | (size_t)b->previous << OR_LINK_BITS;
}

/* The first page of the buddy that contains a page. If a buddy of a lower order begins there, its
 * upper half, or what that was split into, begins with an entry too. */
static size_t firstPage(const orCard *c, size_t page) {
  size_t first = 0;
  for (int order = c->orders - 1; order > 0 && (int)c->buddy[first].order < order; order--)
    if (page - first >= (size_t)1 << (order - 1)) first += (size_t)1 << (order - 1);
  return first;
}

/* ---- mapping ---- */

static size_t tableBytes(int order) { return orWholePages(sizeof(orBuddy) << order); }

/* Maps without a file if the process may not have so large a file (RLIMIT_FSIZE) or one more. Such
 * a mapping works as well, but all of it counts if the system does not overcommit memory. */
static bool mapPages(char *at, size_t bytes, int file, size_t offset) {
  int flags = MAP_SHARED | MAP_FIXED | MAP_NORESERVE | (file < 0 ? MAP_ANONYMOUS : 0);
  return mmap(at, bytes, PROT_READ | PROT_WRITE, flags, file, (off_t)offset) != MAP_FAILED &&
         !madvise(at, bytes, MADV_DONTFORK);
}

static orError_t mapAlias(orCard *c, char *at) {
  c->file = orMemoryFile("openreg", span);
  if (mapPages(at, span, c->file, 0)) return orSuccess;
  int why = errno;
  if (c->file >= 0) close(c->file);
  return orFail(orErrorSystem, "cannot map %zu bytes of device memory: %s", span, strerror(why));
}

/* A child has nothing mapped. */
static void closeInChild(void) {
  if (!atomic_load(&arena)) return;
  for (int i = 0; i < card_count; i++)
    if (cards[i].file >= 0) close(cards[i].file);
}

__attribute__((constructor)) static void atFork(void) { pthread_atfork(NULL, NULL, closeInChild); }

static orError_t mapCard(orCard *c, char *range, void *buddy, int order) {
  if (mprotect(buddy, tableBytes(order), PROT_READ | PROT_WRITE))
    return orFail(orErrorSystem, "cannot map %zu bytes for a table of pages: %s", tableBytes(order),
                  strerror(errno));
  c->buddy = buddy;
  c->orders = order + 1;
  memset(c->free_head, 0, sizeof c->free_head);
  pushFree(c, 0, order);
  return mapAlias(c, range + span);
}

/* Address space may be short (a limit, a sanitizer's layout): a smaller range works until it is
 * fragmented. */
static char *reserve(int *order, size_t *total) {
  int least = orderOf(capacity) + 1;
  for (*order = least - 1 + OR_RANGE_ORDER;; --*order) {
    span = orPageSize() << *order;
    *total = (2 * span + tableBytes(*order)) * (size_t)card_count;
    void *p = mmap(NULL, *total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p != MAP_FAILED || *order == least) return p;
  }
}

/* Maps all cards, at the first allocation on any. */
static orError_t mapAll(void) {
  int order;
  size_t total;
  char *base = reserve(&order, &total);
  if (base == MAP_FAILED)
    return orFail(
        orErrorSystem,
        "cannot reserve %zu bytes of addresses for %d devices of %zu bytes: %s; a smaller "
        "OPENREG_DEVICE_MEMORY needs fewer",
        total, card_count, capacity, strerror(errno));
  orError_t error = orSuccess;
  char *tables = base + 2 * span * (size_t)card_count;
  for (size_t i = 0; i < (size_t)card_count && !error; i++)
    error = mapCard(&cards[i], base + i * 2 * span, tables + i * tableBytes(order), order);
  (void)madvise(base, total, MADV_DONTDUMP);
  if (error)
    munmap(base, total);
  else
    atomic_store_explicit(&arena, base, memory_order_release);
  return error;
}

static orError_t mapOnce(void) {
  if (OR_LIKELY(atomic_load_explicit(&arena, memory_order_acquire) != NULL)) return orSuccess;
  orMutexLock(&mapping);
  orError_t error = atomic_load_explicit(&arena, memory_order_relaxed) ? orSuccess : mapAll();
  orMutexUnlock(&mapping);
  return error;
}

/* ---- the factory ---- */

static orError_t createDevices(const orDeviceConfig *config, int count, orDeviceDesc *devices) {
  (void)config;
  size_t limit = orConfigGet()->device_memory;
  if (!limit && count) {
    OR_TRY(orHostMemoryLimit(&limit));
    limit = limit / 2 / (size_t)count & ~(orPageSize() - 1);
  }
  card_count = count;
  capacity = limit < OR_MOST_MEMORY ? limit : OR_MOST_MEMORY;
  for (int i = 0; i < count; i++) {
    orMutexInit(&cards[i].lock, OR_RANK_PAGES);
    devices[i] =
        (orDeviceDesc){.index = i, .memory_limit = limit, .numa_node = -1, .self = &cards[i]};
  }
  return orSuccess;
}

static orError_t allocate(void *self, size_t bytes, void **ptr) {
  orCard *c = self;
  size_t page = 0;
  OR_TRY(mapOnce());
  orMutexLock(&c->lock);
  bool got = takePages(c, orderOf(bytes), &page);
  if (got) setBytes(&c->buddy[page], bytes);
  orMutexUnlock(&c->lock);
  if (!got)
    return orFail(orErrorMemoryAllocation, "device %d: no %zu bytes of consecutive addresses",
                  (int)(c - cards), bytes);
  *ptr = rangeOf(c) + page * orPageSize();
  return orSuccess;
}

/* Some systems take back no pages of a shared mapping (sandboxes), or none that are locked in
 * memory. These keep their memory until the addresses are allocated again; nothing else is
 * wrong. */
static void warnKept(int why) {
  static atomic_flag warned = ATOMIC_FLAG_INIT;
  if (!atomic_flag_test_and_set(&warned))
    orWarn(
        "the system does not take freed device memory back (%s): it counts as this process's "
        "until it is allocated again",
        strerror(why));
}

bool orSimulatedMapFile(void *ptr, size_t bytes, int descriptor) {
  size_t offset = (size_t)((char *)ptr - atomic_load_explicit(&arena, memory_order_acquire));
  const orCard *c = &cards[offset / (2 * span)];
  bool own = descriptor < 0;
  char *at = (char *)ptr + span;
  bool mapped =
      mapPages(at, bytes, own ? c->file : descriptor, own ? (size_t)((char *)ptr - rangeOf(c)) : 0);
  if (mapped) (void)madvise(at, bytes, MADV_DONTDUMP);
  return mapped;
}

void orSimulatedPunch(void *ptr, size_t bytes) {
  if (madvise((char *)ptr + span, bytes, MADV_REMOVE)) warnKept(errno);
}

static orError_t release(void *self, void *ptr, size_t bytes) {
  orCard *c = self;
  orSimulatedPunch(ptr, orWholePages(bytes));
  orMutexLock(&c->lock);
  givePages(c, (size_t)((char *)ptr - rangeOf(c)) / orPageSize());
  orMutexUnlock(&c->lock);
  return orSuccess;
}

bool orSimulatedHolds(const void *ptr) {
  char *base = atomic_load_explicit(&arena, memory_order_acquire);
  size_t offset = (size_t)((uintptr_t)ptr - (uintptr_t)base);
  return base && offset < 2 * span * (size_t)card_count && !(offset & span);
}

bool orSimulatedAt(const void *ptr, orTouched *place) {
  if (!orSimulatedHolds(ptr)) return false;
  size_t offset = (size_t)((uintptr_t)ptr - (uintptr_t)atomic_load(&arena));
  const orCard *c = &cards[offset / (2 * span)];
  size_t first = firstPage(c, (size_t)((const char *)ptr - rangeOf(c)) / orPageSize());
  *place = (orTouched){.device = (int)(c - cards),
                       .begin = (uintptr_t)rangeOf(c) + first * orPageSize(),
                       .bytes = bytesOf(&c->buddy[first]),
                       .live = true};
  return true;
}

/* The kernel address of device memory of any card. Host addresses are returned unchanged. */
static void *alias(const void *ptr) {
  return (char *)(uintptr_t)ptr + (orSimulatedHolds(ptr) ? span : 0);
}

static orError_t copy(void *self, void *dst, const void *src, size_t bytes, orMemcpyKind kind,
                      orEvent_t done) {
  (void)self, (void)kind, (void)done;
  orCopyBytes(alias(dst), alias(src), bytes);
  return orSuccess;
}

static orError_t set(void *self, void *dst, int value, size_t bytes, orEvent_t done) {
  (void)self, (void)done;
  memset(alias(dst), value, bytes);
  return orSuccess;
}

static orError_t compute(void *self, const orKernel *kernel, orEvent_t done) {
  (void)self, (void)done;
  return kernel->fn(kernel->args);
}

static orError_t map(void *self, const void *ptr, size_t bytes, void **address) {
  (void)self, (void)bytes;
  *address = alias(ptr);
  return orSuccess;
}

const orDeviceFactory orSimulatedFactory = {
    .size = sizeof(orDeviceFactory),
    .abi_version = OPENREG_ABI_VERSION,
    .name = "simulated",
    .create_devices = createDevices,
    .alloc = allocate,
    .free = release,
    .copy = copy,
    .set = set,
    .compute = compute,
    .map = map,
};
