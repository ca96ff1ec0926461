/*
 * Checksums of host memory that cannot be guarded (page_guard.c): registered memory, a vendor's
 * pinned memory, or memory from before the sanitizer was switched on.
 *
 * For memory a task reads, compare the checksum at launch with the one after the task runs. For
 * memory it writes, compare the one after it runs with the one when the host synchronises with it.
 * A difference is a write of the host's in between. It is reported where the host waits; its line
 * is unknown, and a read is not found. No checksum is taken where others may rightly write in
 * between: the host, behind a gate, or tasks.
 *
 * The list is under orSanitizerMutex, without which the bytes are read: they exist until the task
 * is done, or until the host goes on. A checksum belongs to the next task that its thread queues.
 * The tool is on while there are checksums.
 */
#include <stdlib.h>
#include <string.h>

#include "device/pinned_alias.h"
#include "sanitizer/private.h"

typedef struct orSum {
  orShadow access; /* with a reference to its stack */
  uint64_t id;
  uint64_t sum;
  const void *thread;   /* that is about to queue the task */
  const orStream *slot; /* then: of the task; likewise `number` */
  uint64_t number;
  bool has_run, changed;
  struct orSum *next;
} orSum;

static orSum *sums;
static uint64_t ids;
static _Thread_local char here; /* its address is the thread's */
static orTool tool;

static uint64_t sumOf(const orRange *range) {
  static const uint64_t odd = UINT64_C(0x9e3779b97f4a7c15);
  const char *at = (const char *)range->begin;
  uint64_t parts[4] = {1, 2, 3, 4}, words[4];
  size_t left = range->width;
  for (; left >= sizeof words; left -= sizeof words, at += sizeof words) {
    memcpy(words, at, sizeof words);
    for (int i = 0; i < 4; i++) parts[i] = (parts[i] ^ words[i]) * odd;
  }
  memset(words, 0, sizeof words);
  memcpy(words, at, left);
  for (int i = 0; i < 4; i++) parts[i] = (parts[i] ^ words[i]) * odd;
  return parts[0] ^ parts[1] >> 7 ^ parts[2] >> 13 ^ parts[3] >> 29;
}

/* ---- the list (lock held) ---- */

static void erase(orSum **at) {
  orSum *gone = *at;
  *at = gone->next;
  orStackRelease(gone->access.stack);
  free(gone);
  if (!sums) orToolSwitch(&tool, false);
}

static bool meets(const orSum *s, uintptr_t begin, uintptr_t end) {
  return s->access.range.begin < end && begin < s->access.range.end;
}

void orSumsForget(uintptr_t begin, uintptr_t end) {
  for (orSum **at = &sums; *at;)
    if (meets(*at, begin, end))
      erase(at);
    else
      at = &(*at)->next;
}

/* A task that was not queued has left its sums behind; and a destination is written again. */
void orSumsPrepare(const orTouch *touches, size_t count) {
  for (orSum **at = &sums; *at;) {
    bool goes = (*at)->thread == &here;
    for (size_t i = 0; i < count && !goes; i++)
      goes = (*at)->access.write && touches[i].write & OR_ACCESS_WRITES &&
             meets(*at, touches[i].range.begin, touches[i].range.end);
    if (goes)
      erase(at);
    else
      at = &(*at)->next;
  }
}

static bool isWanted(const orTouch *touch) {
  const void *data = (const void *)touch->range.begin; /* NOLINT */
  return touch->pinned && orAliasOf(data) == data;
}

uint64_t orSumsWanted(const orTouch *touches, size_t count) {
  uint64_t wanted = 0;
  for (size_t i = 0; i < count && i < 64; i++) wanted |= (uint64_t)isWanted(&touches[i]) << i;
  return wanted;
}

void orSumsAdd(const orShadow *access) {
  const orTimeline *t = orTimelineAt(access->timeline);
  if (access->range.dims || access->partial || t->gate_count || t->unsure_from != UINT64_MAX)
    return;
  if (!access->write && orShadowIsWritten(access->range.begin, access->range.end)) return;
  orSum *s = orSanitizerAllocate(sizeof *s);
  *s = (orSum){.access = *access, .id = ++ids, .thread = &here, .next = sums};
  orStackRetain(access->stack);
  if (!sums) orToolSwitch(&tool, true);
  sums = s;
}

/* ---- taking sums ---- */

typedef bool (*orSumFilter)(const orSum *sum, const orProbe *p);

static bool isToBeQueued(const orSum *s, const orProbe *p) {
  (void)p;
  return s->thread == &here && !s->access.write;
}

static bool isOfTask(const orSum *s, const orProbe *p) {
  return s->slot == p->slot && s->number == p->number;
}

/* The next one after `id`; its range is copied, as it may go while it is looked at. */
static uint64_t nextSum(orSumFilter filter, const orProbe *p, uint64_t id, orRange *range) {
  uint64_t next = 0;
  orMutexLock(&orSanitizerMutex);
  for (const orSum *s = sums; s; s = s->next)
    if (s->id > id && (!next || s->id < next) && filter(s, p)) {
      next = s->id;
      *range = s->access.range;
    }
  orMutexUnlock(&orSanitizerMutex);
  return next;
}

static void keepSum(uint64_t id, uint64_t sum, bool has_run) {
  orMutexLock(&orSanitizerMutex);
  for (orSum *s = sums; s; s = s->next) {
    if (s->id != id) continue;
    if (has_run && !s->access.write)
      s->changed = s->sum != sum;
    else
      s->sum = sum;
    s->has_run = has_run;
  }
  orMutexUnlock(&orSanitizerMutex);
}

static void takeSums(orSumFilter filter, const orProbe *p, bool has_run) {
  orRange range;
  for (uint64_t id = 0; (id = nextSum(filter, p, id, &range));) keepSum(id, sumOf(&range), has_run);
}

void orSumsTake(void) { takeSums(isToBeQueued, NULL, false); }

static void onRan(orProbe *p) {
  if (p->slot) takeSums(isOfTask, p, true);
}

static void onCommit(orProbe *p) {
  orMutexLock(&orSanitizerMutex);
  for (orSum *s = sums; s; s = s->next) {
    if (s->thread != &here || s->access.stream != p->slot->last_handle) continue;
    s->thread = NULL;
    s->slot = p->slot;
    s->number = atomic_load_explicit(&p->slot->queued, memory_order_relaxed) + 1;
  }
  orMutexUnlock(&orSanitizerMutex);
}

static orTool tool = {.on = {[OR_PROBE_COMMIT] = onCommit, [OR_PROBE_RAN] = onRan}};

__attribute__((constructor)) static void add(void) { orToolAdd(&tool); }

/* ---- what the host comes to know of ---- */

/* What has changed stays for who may report it. */
static orSum *takeAcquired(bool compares) {
  orSum *known = NULL;
  for (orSum **at = &sums; *at;) {
    orSum *s = *at;
    bool goes = compares || !s->changed;
    if (!goes || !orHappensBeforeThread(s->access.timeline, s->access.counter)) {
      at = &s->next;
      continue;
    }
    *at = s->next;
    s->next = known;
    known = s;
  }
  if (!sums) orToolSwitch(&tool, false);
  return known;
}

static bool isChanged(const orSum *s) {
  return s->changed || (s->access.write && s->has_run && sumOf(&s->access.range) != s->sum);
}

void orSumsAcquired(bool compares) {
  orRaceList races = {.first = NULL};
  orMutexLock(&orSanitizerMutex);
  orSum *known = sums ? takeAcquired(compares) : NULL;
  orMutexUnlock(&orSanitizerMutex);
  if (!known) return;
  for (orSum *s = known; s && compares; s = s->next) s->changed = isChanged(s);
  orMutexLock(&orSanitizerMutex);
  while (known) {
    orShadow later = known->access;
    later.operation = orSanitizerName("memory access");
    later.stack = NULL;
    later.stream = 0;
    later.write = true;
    later.sequence = orSanitizerMoment();
    if (known->changed) orRaceFound(&known->access, &later, false, &races);
    orSum *next = known->next;
    orStackRelease(known->access.stack);
    free(known);
    known = next;
  }
  orMutexUnlock(&orSanitizerMutex);
  if (!compares) return;
  orRacesReport(&races);
  orStacksFree();
}
