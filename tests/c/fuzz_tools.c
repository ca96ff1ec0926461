/*
 * Random calls of the tools, and forks: see fuzz.h.
 */
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "openreg_fault.h"
#include "openreg_sanitizer.h"
#include "openreg_schedule.h"
#include "fuzz.h"

void injectFault(void) {
  orFault f = {.size = sizeof f,
               .kind = (orFaultKind)below(5),
               .device = anyDevice(),
               .after = below(30),
               .delay_ns = below(20000)};
  orFaultOutcome outcome = {.size = sizeof outcome};
  if (f.kind != orFaultSlowStream && !oneIn(8)) f.delay_ns = 0;
  if (f.kind == orFaultDeviceLost && !oneIn(4)) return;
  if (f.kind == orFaultDeviceLost) atomic_fetch_add(&fuzz.losses, 1);
  if (oneIn(2) && !CALL(orFaultInject(&f))) atomic_fetch_add(&fuzz.faults, 1);
  CALL(orFaultGetOutcome(&outcome, f.kind, f.device));
  if (oneIn(2)) CALL(orFaultRemove(f.kind, f.device));
}

void schedule(void) {
  orSchedulePolicy policy = (orSchedulePolicy)below(4);
  uint64_t seed = below(100);
  char *tape = NULL;
  orScheduleStep steps[32];
  size_t count;
  switch (below(8)) {
    case 0:
      CALL(orScheduleSet(policy, seed));
      break;
    case 1:
      CALL(orScheduleSetTape(oneIn(2) ? "0" : "1,4:2,1,,"));
      break;
    case 2:
      CALL(orScheduleSetTape("1,0,2,1,1,30:1,2"));
      break;
    case 3:
      CALL(orScheduleRecord(below(2)));
      break;
    case 4:
      orCachePoison(below(2));
      break;
    case 5:
      if (!CALL(orScheduleGetTape(&tape))) free(tape);
      CALL(orScheduleSteps(below(50), steps, sizeof *steps, 32, &count));
      break;
    default:
      CALL(orScheduleSwitch(policy, seed));
      CALL(orScheduleGet(&policy, &seed));
  }
}

static void look(const orRaceReport *report, void *context) { (void)report, (void)context; }

static void tellSanitizer(void) {
  Object *o = pinMemory(), *stream = pin(PLAIN_STREAM);
  orMemoryAccess access = {.data = o ? o->data : NULL,
                           .width = 1 + below(64),
                           .write = below(16),
                           .dims = oneIn(16) ? below(12) : below(2),
                           .count = {below(4)},
                           .stride = {below(200)}};
  char to[16];
  CALL(orSanitizerAccess(stream ? stream->handle : OR_STREAM_DEFAULT, "fuzz", &access, 1));
  if (o) CALL(orSanitizerPeek(to, o->data, sizeof to));
  unpin(stream);
  unpin(o);
}

void sanitize(void) {
  orRaceReport one;
  orRaceOrder order = {.size = sizeof order};
  size_t count;
  uint64_t total;
  switch (below(8)) {
    case 0:
      CALL(orSanitizerEnable(
          &(orSanitizerOptions){.size = sizeof(orSanitizerOptions), .reports = below(20)}));
      break;
    case 1:
      CALL(orSanitizerDisable());
      break;
    case 2:
      CALL(orSanitizerReports(below(3), &one, sizeof one, 1, &count, &total));
      CALL(orSanitizerOrder(below(4), &order));
      break;
    case 3:
      CALL(orSanitizerClearReports());
      break;
    case 4:
      orSanitizerInitcheck(below(2));
      orSanitizerPossible(below(2));
      break;
    case 5:
      orSanitizerFound(look, NULL);
      orSanitizerLeft(look, NULL);
      break;
    default:
      tellSanitizer();
  }
}

void trace(void) {
  orTrace t = {.size = sizeof t};
  if (oneIn(2)) {
    CALL(orTraceStart(1 + below(300)));
  } else if (!CALL(orTraceStop(&t))) {
    orTraceFree(&t);
  }
  orTraceTag(below(10));
  orGetLastCorrelation();
}

void report(void) {
  char *text = NULL;
  orWorkerInfo info = {.size = sizeof info};
  orSetting setting = {.size = sizeof setting};
  orFactoryInfo factory = {.size = sizeof factory};
  if (oneIn(2) && !CALL(orHangReport(&text))) free(text);
  CALL(orGetWorkerInfo(&info));
  CALL(orGetSetting((int)below(16), &setting));
  CALL(orGetFactoryInfo((int)below(5), &factory));
}

/* glibc 2.36 aborts if exit() drops the fork handlers of a library while a fork runs them. */
static pthread_mutex_t fork_or_exit = PTHREAD_MUTEX_INITIALIZER;

void forbidForks(void) { pthread_mutex_lock(&fork_or_exit); }

void forkChild(void) {
  if (!oneIn(12)) return;
  pthread_mutex_lock(&fork_or_exit);
  pid_t child = fork();
  pthread_mutex_unlock(&fork_or_exit);
  if (!child) {
    void *p;
    bool refused =
        orMalloc(&p, 1) == orErrorForked && orStreamSynchronize(0) == orErrorForked &&
        orCacheMalloc(&p, 1, 0) == orErrorForked && orGraphReplay(1, 0) == orErrorForked &&
        orScheduleSet(orScheduleFair, 0) == orErrorForked && orDeviceReset() == orErrorForked;
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  while (child > 0 && waitpid(child, &status, 0) < 0) {
  }
  if (status) STRESS_FAIL("a forked child ended with %#x", status);
}
