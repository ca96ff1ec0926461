/*
 * Random graphs against a sequential model.
 *
 * A program is made from a seed and run on a model of the buffers step after step. It has one to
 * five streams; a step is a kernel, a copy or a fill of pieces of the buffers. Every two steps of
 * which one writes what the other touches are ordered by events where their streams are not the
 * same: a branch that another one's work came before waits for it. The same steps are captured once
 * and launched several times, on streams in turn, between eager steps; the contents at the end are
 * the model's.
 *
 * A failure prints the seed; OPENREG_STRESS_SEED=seed runs that program alone.
 */
#include <stdio.h>

#include "gate.h"
#include "openreg_graph.h"

enum { BUFFERS = 6, WORDS = 64, LINES = 5, STEPS = 60, LAUNCHES = 4, PROGRAMS = 150 };

typedef struct Step {
  int kind, line, dst, src; /* kind: 0 kernel, 1 copy, 2 fill */
  uint32_t a;
} Step;

static struct {
  uint64_t seed, random;
  uint32_t *real[BUFFERS], model[BUFFERS][WORDS];
  orStream_t stream[LINES], other;
  Step step[STEPS];
  int lines, steps;
} g;

static uint32_t below(uint32_t n) {
  g.random ^= g.random << 13;
  g.random ^= g.random >> 7;
  g.random ^= g.random << 17;
  return (uint32_t)((g.random >> 32) * n >> 32);
}

/* ---- a step, on the model and for real ---- */

static void mixWords(uint32_t *dst, const uint32_t *src, uint32_t a) {
  for (int i = 0; i < WORDS; i++) dst[i] = dst[i] * 5 + (src[i] ^ a) + (dst[i] >> 7);
}

typedef struct Mix {
  uint32_t *dst, *src, a;
} Mix;

static orError_t mixKernel(void *args) {
  const Mix *m = args;
  void *dst, *src;
  if (orMapForKernel(&dst, m->dst, 4 * WORDS) || orMapForKernel(&src, m->src, 4 * WORDS))
    return orErrorLaunchFailure;
  mixWords(dst, src, m->a);
  return orSuccess;
}

static void runOnModel(const Step *s) {
  uint32_t *dst = g.model[s->dst];
  if (s->kind == 0)
    mixWords(dst, g.model[s->src], s->a);
  else if (s->kind == 1)
    memmove(dst, g.model[s->src], 4 * WORDS);
  else
    memset(dst, (int)(s->a & 255), 4 * WORDS);
}

static void queueStep(const Step *s, orStream_t stream) {
  uint32_t *dst = g.real[s->dst], *src = g.real[s->src];
  Mix m = {dst, src, s->a};
  if (s->kind == 0)
    ASSERT_OK(orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                           .stream = stream,
                                           .fn = mixKernel,
                                           .args = &m,
                                           .args_size = sizeof m,
                                           .name = "mix",
                                           .flags = s->a & 1 ? orLaunchAnyThread : 0}));
  else if (s->kind == 1)
    ASSERT_OK(orMemcpyAsync(dst, src, 4 * WORDS, orMemcpyDefault, stream));
  else
    ASSERT_OK(orMemsetAsync(dst, (int)(s->a & 255), 4 * WORDS, stream));
}

/* ---- order ---- */

static int clocks[LINES][LINES], taken[LINES];

static void orderLines(int before, int after) {
  orEvent_t e = newEvent(0);
  ASSERT_OK(orEventRecord(e, g.stream[before]));
  ASSERT_OK(orStreamWaitEvent(g.stream[after], e));
  ASSERT_OK(orEventDestroy(e));
  for (int i = 0; i < LINES; i++)
    if (clocks[before][i] > clocks[after][i]) clocks[after][i] = clocks[before][i];
}

/* What was last done to a buffer, as a step of a line; reads by each line. */
static int write_line[BUFFERS], write_at[BUFFERS], read_at[BUFFERS][LINES];

static void afterLine(int line, int other, int at) {
  if (other != line && at > clocks[line][other]) orderLines(other, line);
}

static void captureStep(const Step *s) {
  int line = s->line;
  if (line && !clocks[line][0]) { /* joins */
    orderLines(0, line);
    clocks[line][0] += !clocks[line][0];
  }
  afterLine(line, write_line[s->dst], write_at[s->dst]);
  for (int l = 0; l < g.lines; l++) afterLine(line, l, read_at[s->dst][l]);
  if (s->kind < 2) afterLine(line, write_line[s->src], write_at[s->src]);
  queueStep(s, g.stream[line]);
  clocks[line][line] = ++taken[line];
  write_line[s->dst] = line;
  write_at[s->dst] = taken[line];
  if (s->kind < 2) read_at[s->src][line] = taken[line];
}

static orGraph_t capture(void) {
  orGraph_t graph;
  memset(clocks, 0, sizeof clocks);
  memset(taken, 0, sizeof taken);
  memset(write_line, 0, sizeof write_line);
  memset(write_at, 0, sizeof write_at);
  memset(read_at, 0, sizeof read_at);
  ASSERT_OK(orStreamBeginCapture(g.stream[0]));
  clocks[0][0] = taken[0] = 1;
  for (int i = 0; i < g.steps; i++) captureStep(&g.step[i]);
  for (int l = 1; l < g.lines; l++)
    if (taken[l] && clocks[0][l] < taken[l]) orderLines(l, 0);
  ASSERT_OK(orStreamEndCapture(g.stream[0], &graph));
  return graph;
}

/* ---- programs ---- */

static void makeSteps(void) {
  g.lines = 1 + (int)below(LINES);
  g.steps = 1 + (int)below(STEPS);
  for (int i = 0; i < g.steps; i++) {
    Step *s = &g.step[i];
    *s = (Step){.kind = (int)below(3), .line = (int)below((uint32_t)g.lines), .a = below(1u << 30)};
    s->dst = (int)below(BUFFERS);
    s->src = (s->dst + 1 + (int)below(BUFFERS - 1)) % BUFFERS;
  }
}

static void checkContents(orStream_t stream) {
  uint32_t got[WORDS];
  for (int b = 0; b < BUFFERS; b++) {
    ASSERT_OK(orMemcpyWithStream(got, g.real[b], sizeof got, orMemcpyDefault, stream));
    if (memcmp(got, g.model[b], sizeof got))
      FAIL("buffer %d is not the model's; OPENREG_STRESS_SEED=%llu", b, (unsigned long long)g.seed);
  }
}

/* The streams take turns, each after the one before. */
static orStream_t nextStream(orStream_t before) {
  orStream_t next = below(2) ? g.other : g.stream[below((uint32_t)g.lines)];
  orEvent_t e = newEvent(0);
  ASSERT_OK(orEventRecord(e, before));
  ASSERT_OK(orStreamWaitEvent(next, e));
  ASSERT_OK(orEventDestroy(e));
  return next;
}

static void runProgram(uint64_t seed) {
  g.seed = g.random = seed;
  for (int i = 0; i < 4; i++) below(2);
  makeSteps();
  orGraph_t graph = capture();
  orStream_t at = g.other;
  for (int i = 0; i < LAUNCHES; i++) {
    ASSERT_OK(orGraphReplay(graph, at));
    for (int k = 0; k < g.steps; k++) runOnModel(&g.step[k]);
    if (below(2)) at = nextStream(at);
    if (below(2)) {
      const Step *s = &g.step[below((uint32_t)g.steps)];
      queueStep(s, at);
      runOnModel(s);
    }
  }
  if (below(2)) {
    ASSERT_OK(orGraphDestroy(graph));
    graph = 0;
  }
  checkContents(at);
  if (graph) ASSERT_OK(orGraphDestroy(graph));
}

static void stress(void) {
  const char *seed = getenv("OPENREG_STRESS_SEED");
  const char *programs = getenv("OPENREG_STRESS_PROGRAMS");
  uint64_t first = seed ? strtoull(seed, NULL, 10) : 1;
  int count = seed ? 1 : programs ? atoi(programs) : PROGRAMS;
  for (int b = 0; b < BUFFERS; b++) {
    ASSERT_OK(orMalloc((void **)&g.real[b], 4 * WORDS));
    ASSERT_OK(orMemset(g.real[b], 0, 4 * WORDS));
  }
  for (int l = 0; l < LINES; l++) g.stream[l] = newStreamOfPriority(-(int)(l % 4));
  g.other = newStream();
  for (int i = 0; i < count; i++) {
    /* Each program of a run finds what the one before left. */
    for (int b = 0; seed && b < BUFFERS; b++) memset(g.model[b], 0, sizeof g.model[b]);
    runProgram(first + (uint64_t)i);
  }
}

TEST_WITH_LIMIT(graph_stress, 120) { stress(); }

TEST_WITH_LIMIT(graph_stress_under_a_schedule, 120) {
  setenv("OPENREG_SCHEDULE_SEED", "3", 1);
  stress();
}
