/*
 * The sanitizer's guards of pinned memory: what the host does to it without a call, by NumPy, ctypes
 * or C++, under a copy that it has not waited for.
 *
 * Pages of mirrored memory (mirror.h) that a queued access writes are mapped for nobody, those that
 * one reads for reading alone, from before it is queued until some thread has waited for it, whenever
 * it runs: a page is everybody's, and a thread that has may make a system call there. What the pages should be is a function of the shadow (`choose`), found anew for a whole
 * block whenever one of its accesses comes or goes: nothing is counted. A host that touches such a
 * page faults, and the handler asks the shadow about the byte: an access is a report once, and then
 * guards no more; what cannot be judged yet, behind a gate, guards no more until a gate opens; and
 * where no access has the byte, as of a page that several parts of a block share, the page is lifted.
 * In each case the host goes on.
 *
 * The handler is called by the very instruction that touches the memory, so it may do what a function
 * could that were called there, locks and allocations included: none of the code that runs under a
 * lock of ours, or in malloc, touches pinned memory but by its mirror. It asks that the thread has no
 * lock of the sanitizer (`inside`) all the same, and leaves every other fault to the handler that was
 * there before. A task that comes to such a page, as one that was queued while the sanitizer was off,
 * has the page lifted and is no host.
 *
 * A system call does not fault: it fails with EFAULT, and nobody is told.
 *
 * The handler stays where it is when the sanitizer is off: a thread may be on its way to it.
 * `installing` guards `before`, which the handler reads.
 */
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <ucontext.h>

#include "a64.h"
#include "mirror.h"
#include "sanitizer.h"

enum { OR_PATIENCE = 100 }; /* faults of one address in a page that is not guarded */

static orMutex installing = OR_MUTEX_INITIALIZER(OR_RANK_LEAF);
static struct sigaction before;

/* Of a signal handler's. */
static _Thread_local struct {
  uintptr_t chained; /* where on the stack it has called the handler before; or 0 */
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
    if (s->judged || orAnybodyKnows(s->timeline, s->counter)) continue;
    orPages own = {s->range.begin < first ? 0 : (s->range.begin - first) / page,
                   s->range.end > end ? pages : (s->range.end - 1 - first) / page + 1};
    raiseGuards(guards, own, s->write ? OR_GUARD_ALL : OR_GUARD_WRITES);
    if (own.from < all.from) all.from = own.from;
    if (own.to > all.to) all.to = own.to;
  }
  return all;
}

static void install(void);

void orGuardRenew(uintptr_t begin, uintptr_t end) {
  if (!atomic_load_explicit(&orMirrorCount, memory_order_relaxed)) return;
  install();
  orMirrorGuard(begin, end, false, choose);
}

void orGuardRenewAll(void) { orMirrorGuard(0, UINTPTR_MAX, true, choose); }

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

/* Where the processor does not say it, what the page refuses decides. */
static bool writes(const void *context, orGuard guard) {
  const ucontext_t *user = context;
#if defined(__x86_64__)
  (void)guard;
  return user->uc_mcontext.gregs[REG_ERR] & 2;
#elif defined(__aarch64__)
  const mcontext_t *machine = &user->uc_mcontext;
  return orA64Wrote(machine->__reserved, sizeof machine->__reserved, *(const uint32_t *)machine->pc,
                    guard == OR_GUARD_WRITES);
#else
  (void)user;
  return guard == OR_GUARD_WRITES;
#endif
}

static bool mayTouch(orGuard guard, bool write) {
  return guard == OR_GUARD_NOTHING || (guard == OR_GUARD_WRITES && !write);
}

/* Another thread has been faster; but something else may be wrong with the page. */
static bool mayTryAgain(uintptr_t address) {
  fault.times = fault.address == address ? fault.times + 1 : 0;
  fault.address = address;
  return fault.times < OR_PATIENCE;
}

typedef struct orFault {
  uintptr_t address;
  const ucontext_t *context;
  orGuard guard;
  bool resolved;
} orFault;

/* Needs little stack. */
static bool isOurs(orFault *f) {
  return !orInForkedChild() && !orSanitizerIsInside() && orMirrorGuardAt(f->address, &f->guard);
}

static bool resolve(const orFault *f) {
  orGuard guard = f->guard;
  bool write = writes(f->context, guard);
  if (mayTouch(guard, write)) return mayTryAgain(f->address);
  fault.times = 0;
  if (orProcessTask() == OR_TASK_NONE) orSanitizerTouched(f->address, write);
  /* Other accesses may guard the page still, or it was none that did. */
  return !orMirrorGuardAt(f->address, &guard) || mayTouch(guard, write) || orMirrorLift(f->address);
}

/* ---- the stack ---- */

/* Note [Stacks of the fault handler]: with SA_ONSTACK the system runs the handler on the thread's
 * alternate stack, if it has one. A handler that was there before needs that to report a stack
 * overflow. Our report needs more than such a stack holds (the caller's `capture` and `touched` run
 * in it), so a fault of ours, which is no overflow, is resolved on the stack that it interrupted.
 * The alternate stack is switched off meanwhile: a fault within the report would start at its top
 * again, over the frame that the system returns through. */

#if defined(__x86_64__)

enum { OR_ON_STACK = SA_ONSTACK, OR_RED_ZONE = 128 };

static uintptr_t interruptedStack(const ucontext_t *c) {
  return (uintptr_t)c->uc_mcontext.gregs[REG_RSP];
}

static void callOnStack(uintptr_t top, void (*fn)(void *), void *argument) {
  __asm__ volatile(
      "movq %%rsp, %%rbx\n\t"
      "movq %[top], %%rsp\n\t"
      "call *%[fn]\n\t"
      "movq %%rbx, %%rsp"
      : "+D"(argument)
      : [top] "r"(top), [fn] "r"(fn)
      : "rax", "rbx", "rcx", "rdx", "rsi", "r8", "r9", "r10", "r11", "xmm0", "xmm1", "xmm2", "xmm3",
        "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14",
        "xmm15", "cc", "memory");
}

#elif defined(__aarch64__)

enum { OR_ON_STACK = SA_ONSTACK, OR_RED_ZONE = 0 };

static uintptr_t interruptedStack(const ucontext_t *c) { return c->uc_mcontext.sp; }

static void callOnStack(uintptr_t top, void (*fn)(void *), void *argument) {
  register void *first __asm__("x0") = argument;
  __asm__ volatile(
      "mov x19, sp\n\t"
      "mov sp, %[top]\n\t"
      "blr %[fn]\n\t"
      "mov sp, x19"
      : "+r"(first)
      : [top] "r"(top), [fn] "r"(fn)
      : "x1", "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14",
        "x15", "x16", "x17", "x18", "x19", "x30", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7",
        "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20",
        "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31", "cc", "memory");
}

#else /* The handler runs where the fault was. */

enum { OR_ON_STACK = 0, OR_RED_ZONE = 0 };

static uintptr_t interruptedStack(const ucontext_t *c) { return (uintptr_t)c->uc_stack.ss_sp; }
static void callOnStack(uintptr_t top, void (*fn)(void *), void *argument) {
  (void)top;
  fn(argument);
}

#endif

static bool isWithin(const stack_t *stack, uintptr_t address) {
  return address - (uintptr_t)stack->ss_sp < stack->ss_size;
}

static void resolveOffStack(void *argument) {
  orFault *f = argument;
  stack_t alternate, none = {.ss_flags = SS_DISABLE};
  sigaltstack(&none, &alternate);
  f->resolved = resolve(f);
  sigaltstack(&alternate, NULL);
}

/* False if it is no fault of ours. */
static bool resolveFault(uintptr_t address, const ucontext_t *context) {
  orFault f = {.address = address, .context = context};
  if (!isOurs(&f)) return false;
  uintptr_t from = interruptedStack(context);
  if (!isWithin(&context->uc_stack, (uintptr_t)__builtin_frame_address(0)) ||
      isWithin(&context->uc_stack, from))
    return resolve(&f);
  callOnStack((from - OR_RED_ZONE) & ~(uintptr_t)15, resolveOffStack, &f);
  return f.resolved;
}

/* There is no handler before ours, or it has faulted itself. `sent`: by kill() or raise(), so the
 * instruction that is tried again does not fault. */
static void endProcess(int signal_number, bool sent) {
  if (sent && before.sa_handler == SIG_IGN) return;
  signal(signal_number, SIG_DFL);
  if (sent) raise(signal_number);
}

/* What comes here again from there, deeper in the stack, finds nobody to ask. A handler may leave by
 * siglongjmp(): what comes then is not deeper. */
static void callFormer(int signal_number, siginfo_t *info, void *context) {
  uintptr_t here = (uintptr_t)__builtin_frame_address(0);
  bool isFunction = before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN;
  if (!isFunction || here < fault.chained) {
    endProcess(signal_number, info->si_code <= 0);
    return;
  }
  fault.chained = here;
  if (before.sa_flags & SA_SIGINFO)
    before.sa_sigaction(signal_number, info, context);
  else
    before.sa_handler(signal_number);
  fault.chained = 0;
}

static void onFault(int signal_number, siginfo_t *info, void *context) {
  int kept = errno;
  bool ours = info->si_code == SEGV_ACCERR && resolveFault((uintptr_t)info->si_addr, context);
  if (!ours) callFormer(signal_number, info, context);
  errno = kept;
}

/* `installing` held. `now`: who hears of a fault first. */
static bool isInstalled(struct sigaction *now) {
  sigaction(SIGSEGV, NULL, now);
  return now->sa_flags & SA_SIGINFO && now->sa_sigaction == onFault;
}

/* In front of whoever has put a handler of his own there meanwhile. */
static void install(void) {
  struct sigaction now,
      own = {.sa_sigaction = onFault, .sa_flags = SA_SIGINFO | SA_NODEFER | OR_ON_STACK};
  orMutexLock(&installing);
  if (!isInstalled(&now)) {
    before = now;
    sigaction(SIGSEGV, &own, NULL);
  }
  orMutexUnlock(&installing);
}

/* ---- public ---- */

uint32_t orSanitizerHandler(uint32_t comes) {
  struct sigaction now;
  orMutexLock(&installing);
  bool was = isInstalled(&now);
  if (was && !comes) sigaction(SIGSEGV, &before, NULL);
  orMutexUnlock(&installing);
  if (comes) install();
  return was;
}

orError_t orSanitizerHostBlock(void *ptr) {
  orRegion r;
  if (!__atomic_load_n(orSanitizerActive(), __ATOMIC_RELAXED)) return orSuccess;
  OR_TRY(orEnter());
  OR_TRY(orRegionCheck(ptr, orMemoryTypeHost, false, &r));
  if (orHostDevice()->factory == &orPinnedHostFactory) orMirrorMake(r.base, r.size);
  return orSuccess;
}
