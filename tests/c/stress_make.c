/*
 * Making a random program: see stress.h.
 */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "stress.h"

Program program;

static uint32_t below(uint32_t n) {
  program.random ^= program.random << 13;
  program.random ^= program.random >> 7;
  program.random ^= program.random << 17;
  return (uint32_t)((program.random >> 32) * n >> 32);
}

static bool chance(uint32_t percent) { return below(100) < percent; }

/* ---- making: lines and order ---- */

static void join(int *clock, const int *other) {
  for (int i = 0; i < LINES; i++)
    if (other[i] > clock[i]) clock[i] = other[i];
}

static Step *add(Kind kind, int host) {
  if (program.steps == STEPS) STRESS_FAIL("the program does not fit %d steps", STEPS);
  Step *s = &program.step[program.steps++];
  *s = (Step){.kind = kind, .host = host, .line = -1, .event = -1, .dst = -1, .src = -1};
  return s;
}

/* A step on a stream: after what its host knows. */
static Step *addOn(Kind kind, int line) {
  Step *s = add(kind, program.owner[line]);
  s->line = line;
  program.taken[line]++;
  join(program.clock[line], program.clock[s->host]);
  program.clock[line][line] = program.taken[line];
  return s;
}

/* The step comes after those that the other threads have been given so far. */
static void needAll(Step *s) {
  for (int h = 0; h < program.hosts; h++)
    if (h != s->host) s->need[h] = program.steps - 1;
}

static void useEvent(Step *s, int event) {
  Event *e = &program.event[event];
  s->event = event;
  for (int h = 0; h < program.hosts; h++)
    if (h != s->host && e->used_by[h] > s->need[h]) s->need[h] = e->used_by[h];
  e->used_by[s->host] = program.steps;
}

static void addRecord(int line, int event) {
  useEvent(addOn(RECORD, line), event);
  Event *e = &program.event[event];
  e->recorded = line;
  memcpy(e->clock, program.clock[line], sizeof e->clock);
}

static void addWait(int line, int event) {
  useEvent(addOn(WAIT, line), event);
  if (program.event[event].recorded >= 0) join(program.clock[line], program.event[event].clock);
}

static int someEvent(int device) { return device * EVENTS + (int)below(EVENTS); }

static int liveLine(int line) {
  while (program.successor[line] >= 0) line = program.successor[line];
  return line;
}

static int someLine(void) {
  return liveLine(HOSTS + (int)below((uint32_t)(program.lines - HOSTS)));
}

static void openGates(void) {
  if (program.gate_line < 0) return;
  Step *s = add(OPEN_GATE, 0);
  s->b = program.gate_kind;
  program.gate_line = -1;
}

static void closeGateOn(int line) {
  addOn(CLOSE_GATE, line);
  program.gate_line = line;
  program.gate_bytes = 0;
  program.gate_kind = (Gate)below(GATES);
}

/* A full queue blocks, so a gate is opened before one of 1 MiB can come about behind it. */
static void makeRoomFor(uint32_t bytes) {
  program.gate_bytes += bytes;
  if (program.gate_bytes > 12 * OR_MAX_ARGS) openGates();
}

static void addSyncStream(int host, int line) {
  openGates();
  Step *s = add(SYNC_STREAM, host);
  s->line = line;
  needAll(s);
  join(program.clock[host], program.clock[line]);
}

/* Streams that were destroyed are among what a device has been given. */
static void addSyncDevice(int host, int device) {
  openGates();
  Step *s = add(SYNC_DEVICE, host);
  s->a = (uint32_t)device;
  needAll(s);
  for (int i = HOSTS; i < program.lines; i++)
    if (program.device[i] == device) join(program.clock[host], program.clock[i]);
}

/* Line `to` comes after everything that line `from` (a live stream) has been given. */
static void order(int from, int to) {
  switch (below(program.owner[to] == program.owner[from] ? 4 : 3)) {
    case 0: {
      int event = someEvent(program.device[from]);
      openGates();
      addRecord(from, event);
      useEvent(add(SYNC_EVENT, program.owner[to]), event);
      join(program.clock[program.owner[to]], program.event[event].clock);
      return;
    }
    case 3:
      addSyncStream(program.owner[to], from);
      return;
    default: {
      int event = someEvent(program.device[from]);
      addRecord(from, event);
      if (chance(30)) addWait(someLine(), event);
      addWait(to, event);
    }
  }
}

/* The host signals an event right after the stream has been made to wait for it. */
static void orderBySignal(int host, int line) {
  Step *s = addOn(WAIT_SIGNAL, line);
  s->src = host;
  needAll(s); /* the host can do nothing else first that may block */
  needAll(add(SIGNAL, host));
  join(program.clock[line], program.clock[host]);
}

/* Line `to` comes after step `step` of line `from`. */
static void orderAfter(int from, int step, int to) {
  if (step <= program.clock[to][from] ||
      (to >= HOSTS && step <= program.clock[program.owner[to]][from]))
    return;
  if (from == to) return;
  if (from < HOSTS && to >= HOSTS && chance(50)) {
    orderBySignal(from, to);
  } else if (from < HOSTS) { /* a host's own doing: its thread has got past it */
    needAll(add(QUERY, to < HOSTS ? to : program.owner[to]));
    program.step[program.steps - 1].line = someLine();
    join(program.clock[to < HOSTS ? to : program.owner[to]], program.clock[from]);
  } else if (to < HOSTS) {
    addSyncStream(to, liveLine(from));
  } else {
    order(liveLine(from), to);
  }
}

/* The step has the address of what it touches. */
static void needPlaces(Step *s) {
  for (int i = 0; i < 2; i++) {
    int buffer = i ? s->src : s->dst;
    if (buffer < 0) continue;
    const Buffer *b = &program.buffer[buffer];
    if (b->placed_by != s->host && b->placed_at > s->need[b->placed_by])
      s->need[b->placed_by] = b->placed_at;
  }
}

static void beforeRead(int buffer, int line) {
  orderAfter(program.buffer[buffer].write_line, program.buffer[buffer].write_step, line);
}

static void beforeWrite(int buffer, int line) {
  beforeRead(buffer, line);
  for (int i = 0; i < program.lines; i++) orderAfter(i, program.buffer[buffer].read_step[i], line);
}

static void noteRead(int buffer, int line) {
  program.buffer[buffer].read_step[line] = program.taken[line];
}

static void noteWrite(int buffer, int line) {
  program.buffer[buffer].write_line = line;
  program.buffer[buffer].write_step = program.taken[line];
}

/* A step of a host on host memory. */
static Step *addOfHost(Kind kind, int host) {
  program.taken[host]++;
  program.clock[host][host] = program.taken[host];
  return add(kind, host);
}

/* ---- making: steps ---- */

static void range(Step *s, uint32_t most) {
  needPlaces(s);
  uint32_t dst = program.buffer[s->dst].words,
           src = s->src < 0 ? UINT32_MAX : program.buffer[s->src].words;
  uint32_t room = dst < src ? dst : src;
  if (room > most) room = most;
  s->words = chance(30) ? room : 1 + below(room);
  s->dst_at = below(dst - s->words + 1);
  s->src_at = s->src < 0 ? 0 : below(src - s->words + 1);
}

/* Many of them make a record that fills a chunk of the queue, or needs one of its own. */
static uint32_t largeArgument(void) {
  uint32_t most = OR_MAX_ARGS - 64;
  return chance(50) ? most : most - below(chance(50) ? 300 : most);
}

static void makeKernel(int line, uint32_t extra) {
  int dst = (int)below(BUFFERS), src = (int)below(BUFFERS);
  beforeWrite(dst, line);
  beforeRead(src, line);
  makeRoomFor(extra);
  Step *s = addOn(KERNEL, line);
  s->extra = extra;
  s->dst = dst;
  s->src = src;
  s->a = below(UINT32_MAX) | 1;
  s->b = below(UINT32_MAX);
  range(s, UINT32_MAX);
  if (src == dst) s->src_at = s->dst_at;
  uint32_t *d = program.buffer[dst].model + s->dst_at,
           *from = program.buffer[src].model + s->src_at;
  for (uint32_t i = 0; i < s->words; i++) d[i] = mix(d[i], from[i], s->a, s->b);
  noteRead(src, line);
  noteWrite(dst, line);
}

static void makeCopy(int line) {
  int dst = (int)below(BUFFERS), src = (int)below(BUFFERS);
  beforeWrite(dst, line);
  beforeRead(src, line);
  Step *s = addOn(COPY, line);
  s->dst = dst;
  s->src = src;
  range(s, UINT32_MAX);
  memmove(program.buffer[dst].model + s->dst_at, program.buffer[src].model + s->src_at,
          s->words * 4);
  noteRead(src, line);
  noteWrite(dst, line);
}

static void makeFill(int line) {
  int dst = (int)below(BUFFERS);
  beforeWrite(dst, line);
  Step *s = addOn(FILL, line);
  s->dst = dst;
  s->a = below(256);
  range(s, UINT32_MAX);
  memset(program.buffer[dst].model + s->dst_at, (int)s->a, s->words * 4);
  noteWrite(dst, line);
}

/* From pageable memory that is overwritten as soon as the call returns. */
static void makeUpload(int line) {
  int dst = (int)below(BUFFERS);
  beforeWrite(dst, line);
  openGates();
  Step *s = addOn(UPLOAD, line);
  s->dst = dst;
  s->a = below(UINT32_MAX);
  range(s, chance(50) ? STAGED_WORDS : 30000);
  for (uint32_t i = 0; i < s->words; i++) program.buffer[dst].model[s->dst_at + i] = uploaded(s, i);
  noteWrite(dst, line);
}

/* To pageable memory, and looked at. */
static void makeCheck(int line) {
  int src = (int)below(BUFFERS);
  beforeRead(src, line);
  openGates();
  Step *s = addOn(CHECK, line);
  s->dst = s->src = src;
  range(s, CHECK_WORDS);
  memcpy(s->check, program.buffer[src].model + s->src_at, s->words * 4);
  noteRead(src, line);
  join(program.clock[s->host], program.clock[line]);
}

static void makeHostWrite(int host) {
  int dst = (int)below(BUFFERS);
  if (program.buffer[dst].place != 2) return;
  beforeWrite(dst, host);
  Step *s = addOfHost(HOST_WRITE, host);
  s->dst = dst;
  s->a = below(UINT32_MAX);
  range(s, 5000);
  for (uint32_t i = 0; i < s->words; i++) program.buffer[dst].model[s->dst_at + i] = uploaded(s, i);
  noteWrite(dst, host);
}

/* orFree waits for whoever uses the memory; it is enough that their work has been queued. The new
 * memory is filled at once. */
static void makeReplace(int host) {
  int dst = (int)below(BUFFERS);
  Buffer *b = &program.buffer[dst];
  openGates();
  program.taken[host]++;
  program.clock[host][host] = program.taken[host];
  for (int i = 0; i < program.lines; i++)
    if (b->read_step[i] > program.clock[host][i]) program.clock[host][i] = b->read_step[i];
  if (b->write_step > program.clock[host][b->write_line])
    program.clock[host][b->write_line] = b->write_step;
  Step *s = add(REPLACE, host);
  s->dst = dst;
  s->a = below(256);
  needAll(s);
  b->placed_by = host;
  b->placed_at = program.steps;
  memset(b->model, (int)s->a, b->words * 4);
  noteWrite(dst, host);
}

/* The old stream is left with its work; what it was given is found at the new one. */
static void makeNewStream(int line) {
  if (program.lines == LINES || program.gate_line == line || program.standard[line]) return;
  int fresh = program.lines++, event = someEvent(program.device[line]);
  program.device[fresh] = (int)below(2);
  program.owner[fresh] = program.owner[line];
  program.successor[fresh] = -1;
  addRecord(line, event);
  Step *s = add(NEW_STREAM, program.owner[line]);
  s->line = line;
  s->dst = fresh;
  needAll(s); /* others may have waited for it or looked at it */
  addWait(fresh, event);
  program.successor[line] = fresh;
}

/* A record is reserved in the stream's queue, and not made use of. */
static void makeAbandoned(int line) {
  int event = someEvent(program.device[line]);
  switch (below(3)) {
    case 0: /* nothing is before it */
      addSyncStream(program.owner[line], line);
      addRecord(line, event);
      break;
    case 1:
      addRecord(line, event);
      addWait(line, event);
      break;
    default: {
      Step *s = add(RECORD_REFUSED, program.owner[line]);
      s->line = line;
      useEvent(s, someEvent(!program.device[line]));
    }
  }
}

static void makeBurst(int line) {
  for (int n = 1 + (int)below(3); n > 0; n--) {
    makeKernel(line, largeArgument());
    makeAbandoned(line);
    makeKernel(line, largeArgument());
  }
}

static void makeNoise(int line) {
  switch (below(6)) {
    case 0:
      addOn(NAP, line)->a = below(50000);
      break;
    case 1:
      addRecord(line, someEvent(program.device[line]));
      break;
    case 2:
      addWait(line, someEvent((int)below(2)));
      break;
    case 3:
      add(QUERY, program.owner[line])->line = line;
      break;
    case 4:
      addOn(HOST_FUNC, line);
      break;
    default:
      if (program.hosts == 1 && program.gate_line < 0 && !program.no_gates) closeGateOn(line);
  }
}

static void makeStep(void) {
  int line = someLine();
  uint32_t what = below(100);
  if (what < 28)
    makeKernel(line, chance(5) ? largeArgument() : 0);
  else if (what < 30)
    makeBurst(line);
  else if (what < 52)
    makeCopy(line);
  else if (what < 60)
    makeFill(line);
  else if (what < 67)
    makeUpload(line);
  else if (what < 72)
    makeCheck(line);
  else if (what < 76)
    makeHostWrite(program.owner[line]);
  else if (what < 78)
    makeReplace(program.owner[line]);
  else if (what < 80)
    makeNewStream(line);
  else if (what < 81)
    addSyncStream(program.owner[line], line);
  else if (what < 82)
    addSyncDevice(program.owner[line], program.device[line]);
  else
    makeNoise(line);
}

void makeProgram(uint64_t seed) {
  memset(&program.step, 0, sizeof program.step);
  program.seed = seed;
  program.random = seed * 0x9E3779B97F4A7C15u + 1;
  for (int i = 0; i < 4; i++) below(2);
  program.hosts = 1 + (int)below(HOSTS);
  program.steps = 0;
  program.gate_line = -1;
  int streams = 2 + (int)below(6);
  program.lines = HOSTS + streams;
  memset(program.clock, 0, sizeof program.clock);
  memset(program.taken, 0, sizeof program.taken);
  for (int i = 0; i < LINES; i++) {
    program.successor[i] = -1;
    program.owner[i] = i < HOSTS ? i : (int)below((uint32_t)program.hosts);
    program.device[i] = (int)below(2);
    program.standard[i] = i >= HOSTS && i < HOSTS + 2 && chance(40);
    if (program.standard[i]) program.device[i] = i - HOSTS;
  }
  for (int i = 0; i < 2 * EVENTS; i++) {
    program.event[i] = (Event){.device = i / EVENTS, .recorded = -1};
  }
  bool large = seed % 64 == 0 && !program.no_large_buffers;
  for (int i = 0; i < BUFFERS; i++) {
    Buffer *b = &program.buffer[i];
    uint32_t *model = b->model;
    *b = (Buffer){.place = i < 6 ? i % 2 : 2, .model = model};
    b->words = large && i < 3 ? WORDS_MOST - below(1000)
               : i == 3       ? STAGED_WORDS + below(4000)
                              : 1 + below(chance(20) ? 20000 : 300);
    memset(model, 0, b->words * 4);
  }
  for (int n = large ? 20 : 40 + (int)below(40); n > 0 && program.steps < STEPS - 300; n--)
    makeStep();
  openGates();
}
