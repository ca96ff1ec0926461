/*
 * Rounds of random programs (soak.h), each in a process with settings of its own.
 *
 * A round's number is the seed of its programs divided by ROUND. It decides between the programs
 * of stress.h and the calls of fuzz.h, the settings and the plugin, and whether the last program
 * ends by an exit in its midst. So the seed of a program fixes all of that.
 *
 * OPENREG_STRESS_SEED=seed runs that program alone. `make soak` runs rounds for
 * OPENREG_STRESS_SECONDS, from a seed that it prints. The tests run OPENREG_STRESS_PROGRAMS, at
 * most some hundreds, from fixed seeds.
 */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "openreg_fault.h"
#include "soak.h"

enum {
  /* Seeds. A few of them are run; one round of 16 runs all, which shows what the process grows
   * by. */
  ROUND = 1024,
  PROGRAM_LIMIT_S = 60 /* a hang names its seed before the test's limit */
};

Soak *soak;

static struct {
  uint64_t first, count; /* seeds */
  bool again;            /* the first one, all the time */
  bool calls, exits;
  char text[512];
  FILE *errors; /* the rounds' stderr */
} this_round;

/* ---- settings ---- */

/* `percent` of the rounds have one of the values. */
static const struct {
  const char *name;
  unsigned percent;
  const char *values[4];
} settings[] = {
    {"OPENREG_PLUGIN", 15, {"libvendor.so", "libvendor_nomap.so"}},
    {"OPENREG_PEER_ACCESS", 20, {"0"}},
    {"OPENREG_DEVICE_MEMORY", 40, {"256M", "1G", "4T"}},
    {"OPENREG_LAUNCH_BLOCKING", 15, {"1"}},
    {"OPENREG_WATCHDOG_S", 20, {"0.001", "0.01", "1"}},
    {"OPENREG_WATCHDOG_SIGNAL", 20, {"USR2"}},
    {"OPENREG_SCHEDULE_SEED", 10, {"2", "7", "late", "early"}},
    {"OPENREG_SCHEDULE_TAPE", 10, {"0", "1", "3:1,2,1,0,9:3"}},
    {"OPENREG_SANITIZER", 15, {"1", "warn"}},
    {"OPENREG_INITCHECK", 10, {"1"}},
    {"OPENREG_POISON", 15, {"1"}},
    {"OPENREG_TRACE_RECORDS", 15, {"1", "100"}},
};
enum { SETTINGS = sizeof settings / sizeof *settings };

static uint64_t mixed(uint64_t *state) {
  uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
  z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
  return z ^ z >> 31;
}

static void note(const char *text, const char *more) {
  size_t length = strlen(this_round.text);
  snprintf(this_round.text + length, sizeof this_round.text - length, " %s%s", text, more);
}

static void set(int i, const char *value) {
  /* ThreadSanitizer has fewer addresses. */
  if (SLOW_BUILD && !strcmp(value, "4T")) value = "2G";
  bool small = this_round.calls && !strcmp(value, "256M");
  if (small) value = "6M"; /* less than the calls ask for */
  note(settings[i].name + strlen("OPENREG_"), "=");
  strcat(this_round.text, value);
  setenv(settings[i].name, !strncmp(value, "lib", 3) ? pluginPath(value) : value, 1);
}

static void drawSettings(uint64_t number) {
  uint64_t random = number;
  this_round.calls = mixed(&random) % 2;
  this_round.exits = mixed(&random) % 4 == 0;
  snprintf(this_round.text, sizeof this_round.text,
           "%s%s:", this_round.calls ? "calls" : "programs",
           this_round.exits ? ", exit at the end" : "");
  clearSettings();
  for (int i = 0; i < SETTINGS; i++) {
    unsigned values = 0;
    while (values < 4 && settings[i].values[values]) values++;
    uint64_t percent = mixed(&random) % 100, value = mixed(&random) % values;
    if (percent < settings[i].percent) set(i, settings[i].values[value]);
  }
  setenv("OPENREG_WATCHDOG_S", "30", 0); /* a report, should a program hang */
}

/* ---- a round ---- */

/* Programs that the settings leave room for. */
static void limitPrograms(void) {
  const char *peers = getenv("OPENREG_PEER_ACCESS"), *plugin = getenv("OPENREG_PLUGIN");
  soak->launch_blocking = getenv("OPENREG_LAUNCH_BLOCKING");
  program.no_large_buffers = peers || plugin;
  program.no_gates =
      soak->launch_blocking || program.no_large_buffers; /* a kernel is more tasks than one */
}

static void runOne(uint64_t seed, bool exits) {
  alarm(PROGRAM_LIMIT_S);
  soak->seed = seed;
  if (this_round.calls || exits)
    soakCalls(seed, exits);
  else
    soakProgram(seed);
  if (getenv("OPENREG_WATCHDOG_SIGNAL")) kill(getpid(), SIGUSR2);
  checkSoak();
}

static void runRound(void) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  dup2(fileno(this_round.errors), STDERR_FILENO);
  limitPrograms();
  startCalls();
  startSoak();
  uint64_t last = this_round.count - 1;
  for (uint64_t i = 0; i <= last; i++) {
    bool exits = this_round.exits && i == last && !this_round.again;
    uint64_t seed = this_round.first + (this_round.again ? 0 : i);
    runOne(exits ? (seed / ROUND + 1) * ROUND - 1 : seed, exits);
  }
  measureSoak();
}

static void printErrors(void) {
  char text[8192];
  long size = (fseek(this_round.errors, 0, SEEK_END), ftell(this_round.errors));
  fseek(this_round.errors, size > (long)sizeof text ? size - (long)sizeof text : 0, SEEK_SET);
  for (size_t length; (length = fread(text, 1, sizeof text, this_round.errors));)
    fwrite(text, 1, length, stdout);
}

/* The round is a process of its own, so this one prints the seed whatever ends it. */
static void superviseRound(uint64_t first, uint64_t count) {
  this_round.first = first;
  this_round.count = count;
  drawSettings(first / ROUND);
  rewind(this_round.errors);
  if (ftruncate(fileno(this_round.errors), 0)) FAIL("the file of errors cannot be emptied");
  int status = forkAndRun(runRound);
  if (!status || (this_round.exits && !this_round.again && status == EXIT_STATUS << 8)) return;
  printErrors();
  printf("OPENREG_STRESS_SEED=%" PRIu64 " was running; %s; switched on:%s\n", soak->seed,
         this_round.text, soak->text);
  if (WIFSIGNALED(status)) FAIL("it was ended by signal %d", WTERMSIG(status));
  FAIL("it was ended with status %d", WEXITSTATUS(status));
}

static void startRounds(void) {
  soak = mmap(NULL, sizeof *soak, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT(soak != MAP_FAILED);
  this_round.errors = tmpfile();
  ASSERT(this_round.errors);
}

/* ---- what is printed ---- */

static void printCalls(void) {
  printf("  %" PRIu64 " random calls, %" PRIu64 " signals:", soak->calls, soak->signals);
  for (int i = 0; i <= orErrorCapturedEvent; i++)
    if (soak->outcomes[i])
      printf(" %" PRIu64 " %s", soak->outcomes[i], orGetErrorName((orError_t)i));
  printf("\n");
}

static void printTotal(const char *when) {
  printf("soak %s: %" PRIu64 " programs (%" PRIu64 " with nothing switched on), last seed %" PRIu64
         "; %" PRIu64 " blocks of arguments, %" PRIu64 " forks, %" PRIu64 " resets, %" PRIu64
         " schedules, %" PRIu64 " trace records; faults:",
         when, soak->programs, soak->clean, soak->seed, soak->blocks, soak->forks, soak->resets,
         soak->schedules, soak->traced);
  for (int kind = 0; orFaultName(kind); kind++)
    printf(" %" PRIu64 " %s", soak->struck[kind], orFaultName(kind));
  printf("; heap %.1f MiB (%+.1f), resident %.1f MiB (%+.1f)\n", soak->heap, soak->heap_grown,
         soak->resident, soak->resident_grown);
  printCalls();
  fflush(stdout);
}

/* ---- the runs ---- */

/* Rounds of `count` programs each, of one of the two kinds. */
static void runSample(bool calls, uint64_t rounds, uint64_t count) {
  uint64_t seed = stressSetting("OPENREG_STRESS_SEED", 0),
           most = stressSetting("OPENREG_STRESS_PROGRAMS", 1000);
  startRounds();
  this_round.again = seed;
  if (seed) superviseRound(seed, most);
  for (uint64_t number = 1, run = 0; !seed && run < rounds; number++) {
    drawSettings(number);
    if (this_round.calls != calls) continue;
    superviseRound(number * ROUND, count < most ? count : most);
    run++;
  }
  printTotal("over");
}

static uint64_t programsOf(uint64_t number) {
  return SLOW_BUILD ? ROUND / 64 : number % 16 ? ROUND / 16 : ROUND;
}

static void soakForSeconds(void) {
  uint64_t seconds = stressSetting("OPENREG_STRESS_SECONDS", 1800), minutes = 0,
           only = stressSetting("OPENREG_STRESS_SEED", 0), began = nowNs();
  uint64_t seed = only ? only : (uint64_t)time(NULL) * ROUND;
  startRounds();
  this_round.again = only;
  printf("soak for %" PRIu64 " s from seed %" PRIu64 "\n", seconds, seed);
  while (nowNs() - began < seconds * 1000000000u) {
    superviseRound(seed, programsOf(seed / ROUND));
    printf("%" PRIu64 " %s\n", seed, this_round.text);
    if (!only) seed += ROUND;
    if ((nowNs() - began) / 60000000000u == minutes) continue;
    char when[32];
    minutes = (nowNs() - began) / 60000000000u;
    snprintf(when, sizeof when, "%" PRIu64 " min", minutes);
    printTotal(when);
  }
  printTotal("over");
}

TEST_WITH_LIMIT(soak_random_programs_while_things_go_wrong, 120) { runSample(false, 16, 20); }

TEST_WITH_LIMIT(soak_random_calls, 120) { runSample(true, 8, 10); }

HELPER(soak) { soakForSeconds(); }
