/*
 * The caching allocator against a model, and under threads.
 *
 * The model keeps every segment as an array of blocks in the order of addresses and knows the
 * rules, not the structures: best fit, when to split, merge, which segment to get, what an empty
 * cache means. After each operation the answer of the allocator must be one that the model allows,
 * and the figures must be the model's.
 *
 * OPENREG_STRESS_OPS: operations (1,000,000); OPENREG_STRESS_SEED: another sequence.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

enum { STREAMS = 4, SIDES = 2, MAX_LIVE = 300, MAX_SEGMENTS = 256 };

static size_t envNumber(const char *name, size_t otherwise) {
  const char *text = getenv(name);
  return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

static uint64_t next(uint64_t *state) {
  uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
  z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
  return z ^ z >> 31;
}

static size_t below(uint64_t *state, size_t limit) { return (size_t)(next(state) % limit); }

/* Many small ones, some large, both sides of each limit. */
static size_t randomSize(uint64_t *state) {
  static const size_t edges[] = {1,   511,     512,          513,      MIB - 1,
                                 MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 10 * MIB + 1};
  size_t kind = below(state, 100);
  if (kind < 60) return 1 + below(state, 16 * KIB);
  if (kind < 80) return 1 + below(state, MIB);
  if (kind < 90) return MIB + below(state, 9 * MIB);
  if (kind < 95) return 10 * MIB + below(state, 14 * MIB);
  return edges[below(state, sizeof edges / sizeof *edges)];
}

/* ---- The model ---- */

typedef enum State { FREE, LIVE, LIMBO } State;

typedef struct Block {
  uintptr_t start;
  size_t size, requested;
  State state;
  unsigned recorded; /* bit i: side i; in limbo: those not done then and since */
} Block;

typedef struct Segment {
  Block *block;
  int count, capacity;
  int stream, pool; /* pool: 1 small, 2 large */
  size_t size;
} Segment;

typedef struct Model {
  Segment segment[MAX_SEGMENTS];
  int segments;
  size_t reserved, capacity;
  int64_t retries, ooms;
  int64_t live[2][3], peak[2][3]; /* blocks and bytes, in each pool */
} Model;

static size_t rounded(size_t bytes) { return (bytes + 511) / 512 * 512; }
static int poolOf(size_t bytes) { return bytes <= MIB ? 1 : 2; }

static void insertBlock(Segment *g, int at, Block block) {
  if (g->count == g->capacity) {
    g->capacity = g->capacity ? g->capacity * 2 : 8;
    g->block = realloc(g->block, (size_t)g->capacity * sizeof *g->block);
  }
  memmove(g->block + at + 1, g->block + at, (size_t)(g->count - at) * sizeof *g->block);
  g->block[at] = block;
  g->count++;
}

static void eraseBlock(Segment *g, int at) {
  g->count--;
  memmove(g->block + at, g->block + at + 1, (size_t)(g->count - at) * sizeof *g->block);
}

static void eraseSegment(Model *m, int at) {
  free(m->segment[at].block);
  m->reserved -= m->segment[at].size;
  m->segment[at] = m->segment[--m->segments];
}

static Block *findBlock(Model *m, const void *ptr, Segment **segment, int *index) {
  uintptr_t p = (uintptr_t)ptr;
  for (int i = 0; i < m->segments; i++) {
    Segment *g = &m->segment[i];
    if (p < g->block[0].start || p >= g->block[0].start + g->size) continue;
    for (int j = 0; j < g->count; j++)
      if (g->block[j].start == p) {
        *segment = g;
        *index = j;
        return &g->block[j];
      }
  }
  return NULL;
}

/* Bytes of the best fit, or 0 if nothing fits. */
static size_t bestFit(const Model *m, int stream, int pool, size_t size) {
  size_t best = 0;
  for (int i = 0; i < m->segments; i++) {
    const Segment *g = &m->segment[i];
    if (g->stream != stream || g->pool != pool) continue;
    for (int j = 0; j < g->count; j++) {
      const Block *b = &g->block[j];
      if (b->state == FREE && b->size >= size && (!best || b->size < best)) best = b->size;
    }
  }
  return best;
}

static void becomeFree(Segment *g, int at) {
  g->block[at].state = FREE;
  if (at + 1 < g->count && g->block[at + 1].state == FREE) {
    g->block[at].size += g->block[at + 1].size;
    eraseBlock(g, at + 1);
  }
  if (at > 0 && g->block[at - 1].state == FREE) {
    g->block[at - 1].size += g->block[at].size;
    eraseBlock(g, at);
  }
}

static void countLive(Model *m, int pool, int64_t blocks, int64_t bytes) {
  const int64_t change[2] = {blocks, bytes};
  for (int k = 0; k < 2; k++) {
    m->live[k][0] += change[k];
    m->live[k][pool] += change[k];
    for (int p = 0; p < 3; p++)
      if (m->live[k][p] > m->peak[k][p]) m->peak[k][p] = m->live[k][p];
  }
}

static void becomeLive(Model *m, Segment *g, int at, size_t bytes) {
  size_t size = rounded(bytes), rest = g->block[at].size - size;
  if (g->pool == 1 ? rest >= 512 : rest > MIB) {
    insertBlock(g, at + 1, (Block){.start = g->block[at].start + size, .size = rest});
    g->block[at].size = size;
  }
  g->block[at].state = LIVE;
  g->block[at].requested = bytes;
  g->block[at].recorded = 0;
  countLive(m, g->pool, 1, (int64_t)g->block[at].size);
}

/* What a malloc or free does with limbo blocks whose sides are done. */
static void settle(Model *m) {
  for (int i = 0; i < m->segments; i++)
    for (int j = 0; j < m->segment[i].count; j++) {
      Block *b = &m->segment[i].block[j];
      if (b->state != LIMBO || b->recorded) continue;
      becomeFree(&m->segment[i], j);
      j = -1; /* indices have moved */
    }
}

static void dropIdle(Model *m) {
  for (int i = m->segments - 1; i >= 0; i--)
    if (m->segment[i].count == 1 && m->segment[i].block[0].state == FREE) eraseSegment(m, i);
}

/* The segment that fits into the capacity, or 0. */
static size_t segmentFor(const Model *m, size_t bytes) {
  size_t size = rounded(bytes), page = pageSize(), exact = (size + page - 1) / page * page;
  size_t usual = size <= MIB       ? 2 * MIB
                 : size < 10 * MIB ? 20 * MIB
                                   : (size + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
  size_t room = m->capacity - m->reserved;
  return usual <= room ? usual : exact <= room ? exact : 0;
}

static void addSegment(Model *m, void *ptr, size_t size, int stream, int pool) {
  uintptr_t start = (uintptr_t)ptr;
  for (int i = 0; i < m->segments; i++) {
    uintptr_t other = m->segment[i].block[0].start;
    if (start < other + m->segment[i].size && other < start + size)
      FAIL("segments overlap at %p", ptr);
  }
  ASSERT_LT(m->segments, MAX_SEGMENTS);
  Segment *g = &m->segment[m->segments++];
  *g = (Segment){.stream = stream, .pool = pool, .size = size};
  insertBlock(g, 0, (Block){.start = start, .size = size});
  m->reserved += size;
}

/* The figures in the order of orCacheStats. */
static void count(const Model *m, int64_t out[9][3]) {
  memset(out, 0, 9 * sizeof *out);
  for (int i = 0; i < m->segments; i++) {
    const Segment *g = &m->segment[i];
    int64_t add[9] = {[1] = 1, [5] = (int64_t)g->size};
    for (int j = 0; j < g->count; j++) {
      const Block *b = &g->block[j];
      int64_t size = (int64_t)b->size;
      bool split = g->count > 1;
      add[0] += b->state == LIVE;
      add[2] += b->state != FREE;
      add[3] += b->state == FREE && split;
      add[4] += b->state == LIVE ? size : 0;
      add[6] += b->state != FREE ? size : 0;
      add[7] += b->state == FREE && split ? size : 0;
      add[8] += b->state != FREE ? (int64_t)b->requested : 0;
    }
    for (int k = 0; k < 9; k++) {
      out[k][0] += add[k];
      out[k][g->pool] += add[k];
    }
  }
}

static void compare(const Model *m) {
  int64_t want[9][3];
  orCacheStats stats = {.size = sizeof stats};
  orCacheStat got[27];
  count(m, want);
  ASSERT_OK(orCacheGetStats(&stats, 0));
  memcpy(got, (char *)&stats + offsetof(orCacheStats, allocation), sizeof got);
  for (int k = 0; k < 9; k++)
    for (int p = 0; p < 3; p++) {
      const orCacheStat *stat = &got[3 * k + p];
      if (stat->current != want[k][p])
        FAIL("figure %d, pool %d: %lld, the model has %lld", k, p, (long long)stat->current,
             (long long)want[k][p]);
      ASSERT_GE(stat->peak, stat->current);
      ASSERT_EQ(stat->allocated - stat->freed, stat->current);
    }
  for (int p = 0; p < 3; p++) {
    ASSERT_EQ(stats.allocation[p].peak, m->peak[0][p]);
    ASSERT_EQ(stats.allocated_bytes[p].peak, m->peak[1][p]);
  }
  ASSERT_EQ(stats.alloc_retries, m->retries);
  ASSERT_EQ(stats.ooms, m->ooms);
}

/* ---- The run ---- */

typedef struct Run {
  Model model;
  uint64_t random;
  orStream_t stream[STREAMS], side[SIDES];
  orEvent_t gate[SIDES];
  unsigned busy; /* bit i: side i is held */
  void *live[MAX_LIVE];
  int live_count;
} Run;

static void release(Run *r, int side) {
  if (!(r->busy & 1u << side)) return;
  ASSERT_OK(orEventSignal(r->gate[side], orSuccess));
  ASSERT_OK(orEventDestroy(r->gate[side]));
  ASSERT_OK(orStreamSynchronize(r->side[side]));
  r->busy &= ~(1u << side);
  for (int i = 0; i < r->model.segments; i++)
    for (int j = 0; j < r->model.segment[i].count; j++) {
      Block *b = &r->model.segment[i].block[j];
      if (b->state == LIMBO) b->recorded &= r->busy;
    }
}

static void hold(Run *r, int side) {
  if (r->busy & 1u << side) return;
  ASSERT_OK(orEventCreateWithFlags(&r->gate[side], orEventExternal));
  ASSERT_OK(orStreamWaitEvent(r->side[side], r->gate[side]));
  r->busy |= 1u << side;
}

/* What the model expects of a malloc that finds nothing cached: the size of the segment, or 0
 * for out of memory. */
static size_t expectGrowth(Run *r, size_t bytes) {
  Model *m = &r->model;
  size_t size = segmentFor(m, bytes);
  if (size) return size;
  m->retries++;
  dropIdle(m);
  size = segmentFor(m, bytes);
  if (!size) m->ooms++;
  return size;
}

static void stepMalloc(Run *r) {
  Model *m = &r->model;
  size_t bytes = randomSize(&r->random), size = rounded(bytes);
  int stream = (int)below(&r->random, STREAMS), pool = poolOf(size);
  if (r->live_count == MAX_LIVE || m->segments == MAX_SEGMENTS) return;
  settle(m);
  size_t fit = bestFit(m, stream, pool, size);
  /* The allocator would wait for the gates before it gives up. */
  if (!fit && !segmentFor(m, bytes)) {
    for (int i = 0; i < SIDES; i++) release(r, i);
    settle(m);
    fit = bestFit(m, stream, pool, size);
  }
  size_t segment = fit ? 0 : expectGrowth(r, bytes);
  void *ptr = NULL;
  orError_t error = orCacheMalloc(&ptr, bytes, r->stream[stream]);
  if (!fit && !segment) {
    ASSERT_ERROR(error, orErrorMemoryAllocation);
    ASSERT_PTR(ptr, NULL);
    return;
  }
  ASSERT_OK(error);
  ASSERT_EQ((uintptr_t)ptr % 512, 0);
  if (!fit) addSegment(m, ptr, segment, stream, pool);
  Segment *g;
  int at;
  Block *b = findBlock(m, ptr, &g, &at);
  if (!b || b->state != FREE) FAIL("%p is not free in the model", ptr);
  ASSERT_EQ(g->stream, stream);
  ASSERT_EQ(g->pool, pool);
  if (fit) ASSERT_EQ(b->size, fit);
  becomeLive(m, g, at, bytes);
  r->live[r->live_count++] = ptr;
}

static void stepFree(Run *r) {
  if (!r->live_count) return;
  int i = (int)below(&r->random, (size_t)r->live_count), at;
  void *ptr = r->live[i];
  r->live[i] = r->live[--r->live_count];
  Segment *g;
  Block *b = findBlock(&r->model, ptr, &g, &at);
  ASSERT(b && b->state == LIVE);
  ASSERT_OK(orCacheFree(ptr));
  b->state = LIMBO;
  b->recorded &= r->busy;
  countLive(&r->model, g->pool, -1, -(int64_t)b->size);
  settle(&r->model);
  if (below(&r->random, 16) == 0) ASSERT_ERROR(orCacheFree(ptr), orErrorInvalidValue);
}

static void stepRecord(Run *r) {
  if (!r->live_count) return;
  int side = (int)below(&r->random, SIDES), at;
  void *ptr = r->live[below(&r->random, (size_t)r->live_count)];
  Segment *g;
  Block *b = findBlock(&r->model, ptr, &g, &at);
  ASSERT_OK(orCacheRecordStream((char *)ptr + below(&r->random, b->size), r->side[side]));
  b->recorded |= 1u << side;
}

static void stepEmpty(Run *r) {
  for (int i = 0; i < SIDES; i++) release(r, i);
  ASSERT_OK(orCacheEmpty(0));
  settle(&r->model);
  dropIdle(&r->model);
}

/* Waves of filling and draining, so that memory runs out and blocks merge. */
static void step(Run *r, size_t number) {
  size_t kind = below(&r->random, 1000);
  if (kind < (number / 4096 % 2 ? 400u : 520u))
    stepMalloc(r);
  else if (kind < 900)
    stepFree(r);
  else if (kind < 960)
    stepRecord(r);
  else if (kind < 978)
    hold(r, (int)(kind & 1));
  else if (kind < 999)
    release(r, (int)(kind & 1));
  else
    stepEmpty(r);
}

TEST_WITH_LIMIT(cache_stress_against_a_model, 900) {
  setenv("OPENREG_DEVICE_MEMORY", "256M", 1);
  size_t operations = envNumber("OPENREG_STRESS_OPS", 1000000);
  Run *r = calloc(1, sizeof *r);
  r->random = envNumber("OPENREG_STRESS_SEED", 1);
  r->model.capacity = 256 * MIB;
  ASSERT_OK(orStreamGetDefault(&r->stream[0], 0));
  for (int i = 1; i < STREAMS; i++) ASSERT_OK(orStreamCreate(&r->stream[i]));
  for (int i = 0; i < SIDES; i++) ASSERT_OK(orStreamCreate(&r->side[i]));
  for (size_t i = 0; i < operations; i++) {
    step(r, i);
    if (i % 64 == 0) compare(&r->model);
  }
  ASSERT_GT(r->model.ooms + (operations < 100000), 0); /* or it was no stress */
  for (int i = 0; i < r->live_count; i++) ASSERT_OK(orCacheFree(r->live[i]));
  for (int i = 0; i < SIDES; i++) release(r, i);
  ASSERT_OK(orCacheEmpty(0));
  orCacheStats stats = {.size = sizeof stats};
  ASSERT_OK(orCacheGetStats(&stats, 0));
  ASSERT_EQ(stats.reserved_bytes[0].current, 0);
  ASSERT_EQ(stats.active[0].current, 0);
  ASSERT_EQ(stats.requested_bytes[0].current, 0);
  ASSERT_EQ(stats.device_alloc, stats.device_free);
}

/* ---- Threads ---- */

enum { THREADS = 6, DEVICES = 2, SHARED = 3, SLOTS = 16 };

typedef struct Parcel {
  void *ptr;
  size_t bytes;
  unsigned char value;
  int device;
} Parcel;

typedef struct Shared {
  pthread_mutex_t lock;
  Parcel parcel[SLOTS]; /* lock; blocks on their way to another thread, their contents complete */
  orStream_t stream[DEVICES][SHARED];
  size_t rounds;
} Shared;

/* Fills a block on a stream and looks at both ends: nobody else may have written there. */
static void writeAndCheck(const Parcel *p, orStream_t stream, unsigned char *host,
                          unsigned char value) {
  size_t end = p->bytes < 64 ? p->bytes : 64;
  ASSERT_OK(orMemsetAsync(p->ptr, value, p->bytes, stream));
  ASSERT_OK(orMemcpyAsync(host, p->ptr, end, orMemcpyDefault, stream));
  ASSERT_OK(
      orMemcpyAsync(host + 64, (char *)p->ptr + p->bytes - end, end, orMemcpyDefault, stream));
  ASSERT_OK(orStreamSynchronize(stream));
  for (size_t i = 0; i < end; i++) {
    ASSERT_EQ(host[i], value);
    ASSERT_EQ(host[64 + i], value);
  }
}

static void checkContents(const Parcel *p, orStream_t stream, unsigned char *host) {
  size_t end = p->bytes < 64 ? p->bytes : 64;
  ASSERT_OK(orMemcpyAsync(host, (char *)p->ptr + p->bytes - end, end, orMemcpyDefault, stream));
  ASSERT_OK(orStreamSynchronize(stream));
  for (size_t i = 0; i < end; i++) ASSERT_EQ(host[i], p->value);
}

static Parcel exchange(Shared *shared, size_t slot, Parcel mine) {
  pthread_mutex_lock(&shared->lock);
  Parcel other = shared->parcel[slot];
  shared->parcel[slot] = mine;
  pthread_mutex_unlock(&shared->lock);
  return other;
}

/* A block of another thread: used on a stream of our choice, recorded, and freed while that use
 * is queued. */
static void receive(Shared *shared, uint64_t *random, Parcel p, unsigned char *host,
                    unsigned char value) {
  if (!p.ptr) return;
  orStream_t stream = shared->stream[p.device][below(random, SHARED)];
  checkContents(&p, stream, host);
  ASSERT_OK(orCacheRecordStream((char *)p.ptr + below(random, p.bytes), stream));
  ASSERT_OK(orMemsetAsync(p.ptr, value, p.bytes, stream));
  ASSERT_OK(orCacheFree(p.ptr));
}

static void work(int thread, void *context) {
  Shared *shared = context;
  uint64_t random = (uint64_t)thread + 1000 * envNumber("OPENREG_STRESS_SEED", 1);
  unsigned char *host, value = (unsigned char)(thread + 1);
  ASSERT_OK(orMallocHost((void **)&host, 128));
  for (size_t i = 0; i < shared->rounds; i++) {
    Parcel p = {.device = (int)below(&random, DEVICES), .value = value};
    p.bytes = below(&random, 20) ? 1 + below(&random, 64 * KIB) : 1 + below(&random, 3 * MIB);
    orStream_t stream = shared->stream[p.device][below(&random, SHARED)];
    ASSERT_OK(orSetDevice(p.device));
    ASSERT_OK(orCacheMalloc(&p.ptr, p.bytes, stream));
    writeAndCheck(&p, stream, host, value);
    if (below(&random, 3))
      ASSERT_OK(orCacheFree(p.ptr));
    else
      receive(shared, &random, exchange(shared, below(&random, SLOTS), p), host, value);
    if (below(&random, 100) == 0) ASSERT_OK(orCacheEmpty(p.device));
  }
  ASSERT_OK(orFreeHost(host));
}

TEST_WITH_LIMIT(cache_stress_with_threads, 300) {
  setenv("OPENREG_DEVICE_MEMORY", "256M", 1);
  static Shared shared = {.lock = PTHREAD_MUTEX_INITIALIZER};
  shared.rounds = envNumber("OPENREG_STRESS_ROUNDS", 400);
  for (int d = 0; d < DEVICES; d++) {
    ASSERT_OK(orSetDevice(d));
    for (int i = 0; i < SHARED; i++) ASSERT_OK(orStreamCreate(&shared.stream[d][i]));
  }
  runThreads(THREADS, work, &shared);
  for (int i = 0; i < SLOTS; i++) ASSERT_OK(orCacheFree(shared.parcel[i].ptr));
  for (int d = 0; d < DEVICES; d++) {
    orCacheStats stats = {.size = sizeof stats};
    ASSERT_OK(orCacheEmpty(d));
    ASSERT_OK(orCacheGetStats(&stats, d));
    ASSERT_EQ(stats.active_bytes[0].current, 0);
    ASSERT_EQ(stats.reserved_bytes[0].current, 0);
  }
}
