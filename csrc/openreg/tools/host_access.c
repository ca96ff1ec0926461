/*
 * The handler of SIGSEGV: it resolves faults of memory that the sanitizer guards (page_guard.c).
 * For a fault of device memory, it writes to stderr whose memory the thread has touched before the
 * process ends.
 *
 * The handler is installed at the first use of a device, and stays. All other faults, and those of
 * device memory after the message, go to the previous handler.
 *
 * Note [Report of a host access]: the report may come at any instruction, also under one of the
 * library's locks or in a forked child. It therefore takes no lock, allocates nothing, and calls no
 * function but write(). It reads tables that other threads may be changing: these are never
 * unmapped, and a half-written entry costs a detail of the message.
 *
 * `installing` guards `before`, which the handler reads. `output` and `hint` are atomic.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include "cache/cache.h"
#include "openreg_package.h"
#include "tools/a64.h"
#include "tools/host_access.h"
#include "openreg_host_access.h"

static orMutex installing = OR_MUTEX_INITIALIZER(OR_RANK_LEAF);
static struct sigaction before;
static _Atomic int output = STDERR_FILENO;
static _Atomic(const char *) hint;

/* The signal handler's. */
static _Thread_local struct {
  uintptr_t chained; /* where on the stack it called the previous handler; or 0 */
  uintptr_t reported;
} fault;

static _Thread_local const char *operation;

/* ---- what the processor reports ---- */

/* The address of this thread's last fault, which raise() does not change. */
static uintptr_t lastFault(const ucontext_t *user) {
#if defined(__x86_64__)
  return (uintptr_t)user->uc_mcontext.gregs[REG_CR2];
#elif defined(__aarch64__)
  return user->uc_mcontext.fault_address;
#else
  (void)user;
  return 0;
#endif
}

/* `otherwise` if the processor does not report it. */
bool orFaultWrote(const void *context, bool otherwise) {
  const ucontext_t *user = context;
#if defined(__x86_64__)
  (void)otherwise;
  return user->uc_mcontext.gregs[REG_ERR] & 2;
#elif defined(__aarch64__)
  const mcontext_t *machine = &user->uc_mcontext;
  return orA64Wrote(machine->__reserved, sizeof machine->__reserved, *(const uint32_t *)machine->pc,
                    otherwise);
#else
  (void)user;
  return otherwise;
#endif
}

/* ---- the report: see Note [Report of a host access] ---- */

typedef struct orReport {
  size_t length;
  char text[1024];
} orReport;

static void add(orReport *r, const char *text) {
  while (*text && r->length < sizeof r->text) r->text[r->length++] = *text++;
}

static void addNumber(orReport *r, uint64_t number, unsigned base) {
  char digits[24];
  size_t at = sizeof digits;
  digits[--at] = 0;
  do digits[--at] = "0123456789abcdef"[number % base];
  while (number /= base);
  add(r, digits + at);
}

static void addOrigin(orReport *r, const orOrigin *origin) {
  if (!origin || origin->size < OR_END(orOrigin, line)) return;
  if (origin->type) {
    add(r, ", of ");
    add(r, origin->type);
  }
  if (!origin->file) return;
  add(r, ", allocated at ");
  add(r, origin->file);
  add(r, ":");
  addNumber(r, origin->line, 10);
}

static void addPlace(orReport *r, uintptr_t address, const orTouched *place) {
  add(r, "openreg:   ");
  if (!place->bytes) {
    add(r, "nothing is allocated there\n");
    return;
  }
  add(r, "byte ");
  addNumber(r, address - place->begin, 10);
  add(r, place->live ? " of a block of " : " of a block that is free, of ");
  addNumber(r, place->bytes, 10);
  add(r, " bytes");
  addOrigin(r, place->origin);
  add(r, "\n");
}

static void addOperator(orReport *r) {
  const char *task = orTaskName();
  if (!task && !operation && !orLastQueued()) return;
  add(r, task        ? "openreg:   in the task "
         : operation ? "openreg:   in the operation "
                     : "openreg:   the thread has queued last: ");
  add(r, task ? task : operation ? operation : orLastQueued());
  add(r, "\n");
}

static bool find(uintptr_t address, orTouched *place) {
  *place = (orTouched){.device = -1};
  bool simulated = orSimulatedAt((const void *)address, place);
  return orCacheAt(address, place) || simulated;
}

static bool hasFormer(void) { return before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN; }

static void report(uintptr_t address, const void *context, bool sent) {
  orReport r = {.length = 0};
  orTouched place;
  const char *advice = atomic_load_explicit(&hint, memory_order_acquire);
  if (fault.reported == address || !find(address, &place)) return;
  fault.reported = address;
  add(&r, "openreg: SIGSEGV: ");
  add(&r, orProcessTask() == OR_TASK_NONE ? "the host " : "a task ");
  add(&r, orFaultWrote(context, false) ? "writes 0x" : "reads 0x");
  addNumber(&r, address, 16);
  add(&r, ", memory of ");
  add(&r, orDevicesName());
  add(&r, ":");
  addNumber(&r, (uint64_t)place.device, 10);
  add(&r, ", which is not mapped for it\n");
  addPlace(&r, address, &place);
  addOperator(&r);
  add(&r, orProcessTask() == OR_TASK_NONE
              ? "openreg:   copy it to the host first: x.cpu(); in C, orMemcpy\n"
              : "openreg:   a task reaches device memory through orMapForKernel\n");
  if (!sent && !hasFormer() && advice) add(&r, advice);
  while (write(atomic_load_explicit(&output, memory_order_relaxed), r.text, r.length) < 0 &&
         errno == EINTR) {
  }
}

/* ---- the stack ---- */

/* Note [Stacks of the fault handler]: with SA_ONSTACK the system runs the handler on the thread's
 * alternate stack, if it has one. A previous handler may need that to report a stack overflow. The
 * sanitizer's report needs more than such a stack holds (the caller's `capture` and `touched` run
 * in it). A fault of guarded memory, which is no overflow, is therefore resolved on the interrupted
 * stack. A previous handler that did not ask for the alternate stack is called there too, unless
 * the fault may be an overflow. The alternate stack is switched off meanwhile: a fault on the other
 * one would start at its top again, over the frame that the system returns through. */

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
        "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31", "cc",
        "memory");
}

#else /* The handler runs on the stack of the fault. */

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

/* Whether the address is below the stack's end, as far as a frame may reach. */
static bool mayBeOverflow(uintptr_t stack, uintptr_t address) {
  enum { OR_FRAME = 1 << 20 };
  return address - (stack - OR_FRAME) < 2 * OR_FRAME;
}

typedef struct orOffStack {
  void (*fn)(void *argument);
  void *argument;
} orOffStack;

static void callOffStack(void *argument) {
  const orOffStack *call = argument;
  stack_t alternate, none = {.ss_flags = SS_DISABLE};
  sigaltstack(&none, &alternate);
  call->fn(call->argument);
  sigaltstack(&alternate, NULL);
}

/* Calls the function on the interrupted stack. */
static void callThere(const ucontext_t *context, void (*fn)(void *), void *argument) {
  uintptr_t from = interruptedStack(context);
  if (!isWithin(&context->uc_stack, (uintptr_t)__builtin_frame_address(0)) ||
      isWithin(&context->uc_stack, from)) {
    fn(argument);
    return;
  }
  orOffStack call = {fn, argument};
  callOnStack((from - OR_RED_ZONE) & ~(uintptr_t)15, callOffStack, &call);
}

/* ---- faults ---- */

typedef struct orFault {
  int number;
  siginfo_t *info;
  void *context;
  uintptr_t address;
  bool resolved;
} orFault;

static bool (*is_guarded)(uintptr_t address);
static bool (*resolve)(uintptr_t address, const void *context);

void orFaultSetGuard(bool (*guarded)(uintptr_t), bool (*resolver)(uintptr_t, const void *)) {
  is_guarded = guarded;
  resolve = resolver;
}

static void resolveGuarded(void *argument) {
  orFault *f = argument;
  f->resolved = resolve(f->address, f->context);
}

/* There is no previous handler, or it has faulted itself. `sent`: by kill() or raise(), so the
 * repeated instruction does not fault. */
static void endProcess(int signal_number, bool sent) {
  if (sent && before.sa_handler == SIG_IGN) return;
  signal(signal_number, SIG_DFL);
  if (sent) raise(signal_number);
}

static void callFunction(void *argument) {
  const orFault *f = argument;
  fault.chained = (uintptr_t)__builtin_frame_address(0);
  if (before.sa_flags & SA_SIGINFO)
    before.sa_sigaction(f->number, f->info, f->context);
  else
    before.sa_handler(f->number);
  fault.chained = 0;
}

/* Calls the previous handler with the signals blocked that the system would have blocked for it. */
static void callMasked(const orFault *f) {
  sigset_t mask = before.sa_mask, was;
  if (!(before.sa_flags & SA_NODEFER)) sigaddset(&mask, f->number);
  pthread_sigmask(SIG_BLOCK, &mask, &was);
  orFault call = *f;
  if (before.sa_flags & SA_ONSTACK || mayBeOverflow(interruptedStack(f->context), f->address))
    callFunction(&call);
  else
    callThere(f->context, callFunction, &call);
  pthread_sigmask(SIG_SETMASK, &was, NULL);
}

/* Whether the previous handler has faulted: deeper in the stack that it runs on. It may leave by
 * siglongjmp(); later faults are not deeper. */
static bool isChained(const ucontext_t *context) {
  uintptr_t from = interruptedStack(context);
  return from <= fault.chained &&
         isWithin(&context->uc_stack, from) == isWithin(&context->uc_stack, fault.chained);
}

static void callFormer(const orFault *f) {
  if (hasFormer() && !isChained(f->context))
    callMasked(f);
  else
    endProcess(f->number, f->info->si_code <= 0);
}

/* A handler that was installed later, as Python's faulthandler may be, raises the signal again. */
static bool isRaised(const siginfo_t *info) {
  return info->si_code == SI_TKILL && info->si_pid == getpid();
}

static void onFault(int number, siginfo_t *info, void *context) {
  int kept = errno;
  bool raised = isRaised(info);
  orFault f = {.number = number,
               .info = info,
               .context = context,
               .address = raised ? lastFault(context) : (uintptr_t)info->si_addr};
  if (info->si_code == SEGV_ACCERR && is_guarded(f.address)) callThere(context, resolveGuarded, &f);
  if (!f.resolved) {
    if (info->si_code > 0 || raised) report(f.address, context, raised);
    callFormer(&f);
  }
  errno = kept;
}

/* `installing` held. `now`: the process's present handler. */
static bool isInstalled(struct sigaction *now) {
  sigaction(SIGSEGV, NULL, now);
  return now->sa_flags & SA_SIGINFO && now->sa_sigaction == onFault;
}

void orFaultInstall(void) {
  struct sigaction now,
      own = {.sa_sigaction = onFault, .sa_flags = SA_SIGINFO | SA_NODEFER | OR_ON_STACK};
  orMutexLock(&installing);
  if (!isInstalled(&now)) {
    before = now;
    sigaction(SIGSEGV, &own, NULL);
  }
  orMutexUnlock(&installing);
}

static void onFirstUse(orProbe *p) {
  (void)p;
  orFaultInstall();
}

static orTool tool = {.on = {[OR_PROBE_FIRST_USE] = onFirstUse}};

__attribute__((constructor)) static void addTool(void) { orToolAdd(&tool); }

/* ---- public ---- */

uint32_t orHostAccessHandler(uint32_t comes) {
  struct sigaction now;
  orMutexLock(&installing);
  bool was = isInstalled(&now);
  if (was && !comes) sigaction(SIGSEGV, &before, NULL);
  orMutexUnlock(&installing);
  if (comes) orFaultInstall();
  return was;
}

void orHostAccessOutput(int file) { atomic_store_explicit(&output, file, memory_order_relaxed); }

void orHostAccessHint(const char *text) {
  atomic_store_explicit(&hint, text, memory_order_release);
}

const char *orHostAccessOperation(const char *name) {
  const char *outer = operation;
  operation = name;
  return outer;
}
