/*
 * Guards of pinned memory: finds what the host does to it outside of a call, by NumPy, ctypes or
 * C++, while a copy that the host has not waited for uses it.
 *
 * From the time an access is queued until some thread has synchronised with it, pages of aliased
 * memory (pinned_alias.h) that it writes are PROT_NONE, and pages that it reads are read-only. The
 * protection is a function of the shadow (`choose`), computed for a whole block whenever one of its
 * accesses comes or goes; nothing is counted. A host that touches such a page faults, and the
 * handler compares the byte with the shadow. An access is reported once and then guards no more.
 * One that cannot be judged yet, behind a gate, guards no more until a gate opens. Where no access
 * has the byte, as on a page that several parts of a block share, the guard is removed. In each
 * case the host goes on.
 *
 * The handler of SIGSEGV (host_access.c) calls `resolve` at the instruction that touches the
 * memory, so `resolve` may do what a function called there could, locks and allocations included:
 * code that runs under a lock of ours, or in malloc, touches pinned memory only through its alias.
 * `isGuarded` still checks that the thread does not hold the sanitizer's lock. A task that touches
 * such a page, as one that was queued while the sanitizer was off, has the guard removed and is no
 * host.
 *
 * A system call does not fault: it fails with EFAULT, and nothing is reported.
 */
#include "device/pinned_alias.h"
#include "sanitizer/private.h"
#include "tools/host_access.h"

enum { OR_PATIENCE = 100 }; /* faults of one address in a page that is not guarded */

static void (*touched)(uintptr_t address, bool write); /* of analysis.c */

/* Of a signal handler's. */
static _Thread_local struct {
  uintptr_t address;
  int times;
} fault;

/* ---- what is guarded (orSanitizerMutex held) ---- */

static void raiseGuards(uint8_t *guards, orPages pages, uint8_t least) {
  for (size_t page = pages.from; page < pages.to; page++)
    if (guards[page] < least) guards[page] = least;
}

static orPages choose(uintptr_t first, size_t pages, uint8_t *guards) {
  orShadow **found;
  orPages all = {pages, 0};
  size_t page = orPageSize();
  uintptr_t end = first + pages * page;
  size_t count = orShadowFind(first, end, &found);
  for (size_t i = 0; i < count; i++) {
    const orShadow *s = found[i];
    if (s->judged || orHappensBeforeAny(s->timeline, s->counter)) continue;
    orPages own = {s->range.begin < first ? 0 : (s->range.begin - first) / page,
                   s->range.end > end ? pages : (s->range.end - 1 - first) / page + 1};
    raiseGuards(guards, own, s->write ? OR_GUARD_ALL : OR_GUARD_WRITES);
    if (own.from < all.from) all.from = own.from;
    if (own.to > all.to) all.to = own.to;
  }
  return all;
}

void orGuardRenew(uintptr_t begin, uintptr_t end) {
  if (!atomic_load_explicit(&orAliasCount, memory_order_relaxed)) return;
  orFaultInstall();
  orAliasGuard(begin, end, false, choose);
}

void orGuardRenewAll(void) { orAliasGuard(0, UINTPTR_MAX, true, choose); }

bool orGuardLacksVerdict;

void orGuardUndecided(void) {
  orShadow **found;
  if (!orGuardLacksVerdict) return;
  orGuardLacksVerdict = false;
  for (size_t count = orShadowFind(0, UINTPTR_MAX, &found); count-- > 0; found++)
    if ((*found)->undecided) (*found)->undecided = (*found)->judged = false;
  orGuardRenew(0, UINTPTR_MAX);
}

/* ---- faults ---- */

static bool mayTouch(orGuard guard, bool write) {
  return guard == OR_GUARD_NOTHING || (guard == OR_GUARD_WRITES && !write);
}

/* Another thread has been faster; but something else may be wrong with the page. */
static bool mayTryAgain(uintptr_t address) {
  fault.times = fault.address == address ? fault.times + 1 : 0;
  fault.address = address;
  return fault.times < OR_PATIENCE;
}

/* Needs little stack. Asks with no lock about the device's memory. */
static bool isGuarded(uintptr_t address) {
  orGuard guard;
  return atomic_load_explicit(&orAliasCount, memory_order_relaxed) &&
         !orSimulatedHolds((const void *)address) && !orInForkedChild() && !orSanitizerIsInside() &&
         orAliasGuardAt(address, &guard);
}

/* Where the processor does not say what it was, what the page refuses decides. */
static bool resolve(uintptr_t address, const void *context) {
  orGuard guard = OR_GUARD_NOTHING;
  if (!orAliasGuardAt(address, &guard)) return mayTryAgain(address);
  bool write = orFaultWrote(context, guard == OR_GUARD_WRITES);
  if (mayTouch(guard, write)) return mayTryAgain(address);
  fault.times = 0;
  if (orProcessTask() == OR_TASK_NONE) touched(address, write);
  /* Other accesses may guard the page still, or it was none that did. */
  return !orAliasGuardAt(address, &guard) || mayTouch(guard, write) || orAliasLift(address);
}

void orGuardSetTouched(void (*by_host)(uintptr_t address, bool write)) { touched = by_host; }

__attribute__((constructor)) static void offer(void) { orFaultSetGuard(isGuarded, resolve); }

/* ---- public ---- */

orError_t orSanitizerHostBlock(void *ptr) {
  orRegion r;
  if (!orSanitizerIsOn()) return orSuccess;
  OR_TRY(orEnter());
  OR_TRY(orRegionCheck(ptr, orMemoryTypeHost, false, &r));
  if (orHostDevice()->factory == &orPinnedHostFactory) orAliasMake(r.base, r.size);
  return orSuccess;
}
