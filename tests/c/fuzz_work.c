/*
 * Random work: kernels, host functions, copies, and what a kernel does; see fuzz.h.
 */
#include "openreg_schedule.h"
#include "fuzz.h"

/* ---- causes of failures ---- */

static void dropCause(void *cause) { atomic_fetch_add(&((Account *)cause)->dropped, 1); }

void setCause(void) {
  int index = nextIndex(&fuzz.cause_count);
  if (index < 0) return;
  atomic_store(&fuzz.causes[index].queued, 1);
  orSetFailureCause(&fuzz.causes[index], dropCause);
}

void takeCause(void) {
  unsigned others;
  Account *cause = orTakeFailureCause(oneIn(2) ? &others : NULL);
  if (cause) atomic_fetch_add(&cause->ran, 1);
}

/* ---- work ---- */

typedef enum Behaviour {
  PASSES,
  WRITES,
  FAILS,
  LOSES,
  PIECES,
  ALLOCATES,
  LOCKS,
  CALLS_WHAT_IS_REFUSED,
  NAPS,
  TEARS,
  BEHAVIOURS
} Behaviour;

typedef struct Arguments {
  uint32_t index, salt, extra;
  Behaviour behaviour;
  orStream_t stream;
  char *data;
  size_t width;
  unsigned char bytes[];
} Arguments;

static void verify(const Arguments *a) {
  for (uint32_t i = 0; i < a->extra; i++)
    if (a->bytes[i] != argumentByte(a->salt, i)) atomic_fetch_add(&fuzz.bad_bytes, 1);
}

static void piece(void *context, size_t index) {
  (void)index;
  atomic_fetch_add((_Atomic int *)context, 1);
}

static void runPieces(const Arguments *a) {
  _Atomic int done = 0;
  int count = 1 + (int)(a->salt % 40);
  if (orRunPieces(piece, &done, (size_t)count) || done != count)
    STRESS_FAIL("%d of %d pieces have run", done, count);
}

static void writeBytes(const Arguments *a) {
  void *at;
  if (a->data && !orMapForKernel(&at, a->data, a->width)) memset(at, (int)a->salt, a->width);
}

static void allocateInside(const Arguments *a) {
  void *p = NULL;
  if (!orCacheMalloc(&p, 100 + a->salt % 5000, a->stream) && orCacheFree(p))
    STRESS_FAIL("a task cannot free its block");
}

static void callWhatIsRefused(const Arguments *a) {
  if (orStreamSynchronize(a->stream) != orErrorNotPermitted ||
      orLaunchSleep(a->stream, 0) != orErrorNotPermitted || orDeviceReset() != orErrorNotPermitted)
    STRESS_FAIL("a call was not refused inside of a task");
}

static orError_t failHere(orError_t error) {
  setCause();
  orSetTaskErrorMessage("on purpose");
  if (error == orErrorDeviceLost) atomic_fetch_add(&fuzz.losses, 1);
  return error;
}

static orError_t kernel(void *args) {
  const Arguments *a = args;
  verify(a);
  if (a->behaviour == TEARS && orTaskPart() == orPartSecond) return orSuccess;
  atomic_fetch_add(&fuzz.arguments[a->index].ran, 1);
  switch (a->behaviour) {
    case WRITES:
      writeBytes(a);
      break;
    case FAILS:
      return failHere(orErrorLaunchFailure);
    case LOSES:
      return failHere(orErrorDeviceLost);
    case PIECES:
      runPieces(a);
      break;
    case ALLOCATES:
      allocateInside(a);
      break;
    case LOCKS:
      touchBig();
      break;
    case CALLS_WHAT_IS_REFUSED:
      callWhatIsRefused(a);
      break;
    case NAPS:
      for (volatile int i = 0; i < 3000; i++) {
      }
      break;
    default:
      break;
  }
  return orSuccess;
}

static void dropArguments(void *args) {
  const Arguments *a = args;
  verify(a);
  if (a->salt % 4 == 0) touchBig();
  if (a->salt % 16 == 1 && orStreamQuery(OR_STREAM_DEFAULT) != orErrorNotPermitted)
    STRESS_FAIL("a call was not refused inside of `drop`");
  atomic_fetch_add(&fuzz.arguments[a->index].dropped, 1);
}

static Behaviour anyBehaviour(void) {
  Behaviour b = (Behaviour)below(BEHAVIOURS);
  if (b == FAILS && !oneIn(4)) return PASSES;
  return b == LOSES && !oneIn(40) ? PASSES : b;
}

static uint32_t anyExtra(void) {
  if (oneIn(12)) return OR_MAX_ARGS - (uint32_t)sizeof(Arguments) - below(300);
  return below(oneIn(4) ? 3000 : 64);
}

void launchOn(orStream_t stream, Object *memory, bool captured) {
  static _Thread_local _Alignas(16) char room[OR_MAX_ARGS];
  int index = nextIndex(&fuzz.argument_count), queued = -1;
  if (index < 0) return;
  Arguments *a = (Arguments *)room;
  *a = (Arguments){.index = (uint32_t)index,
                   .salt = below(1 << 30),
                   .extra = anyExtra(),
                   .behaviour = anyBehaviour(),
                   .stream = stream,
                   .width = 1 + below(64)};
  a->data = takeBytes(memory, a->width);
  for (uint32_t i = 0; i < a->extra; i++) a->bytes[i] = argumentByte(a->salt, i);
  orAccess access = {a->data, a->width, 1};
  Account *account = &fuzz.arguments[index];
  account->captured = captured;
  orLaunch launch = {.size = sizeof launch,
                     .stream = stream,
                     .fn = kernel,
                     .args = a,
                     .args_size = sizeof *a + a->extra,
                     .drop = dropArguments,
                     .accesses = &access,
                     .access_count = a->data && oneIn(2),
                     .name = oneIn(8) ? "aten::copy_" : "fuzz",
                     .flags = below(16),
                     .queued = &queued};
  orError_t error = CALL(orLaunchKernelEx(&launch));
  if (queued != 0 && queued != 1) STRESS_FAIL("`queued` is %d after a launch", queued);
  if (!error && !queued) STRESS_FAIL("a launch succeeded and `queued` is 0");
  bool waited = launch.flags & orLaunchWaits && !captured && error != orErrorNotPermitted;
  if (queued && waited && !account->dropped)
    STRESS_FAIL("a launch that waits returned before its arguments were dropped");
  atomic_store(&account->queued, queued);
  memset(a->bytes, 0xee, a->extra);
}

void launchLoose(void) { launchOn(loose(STREAM), kept(), true); }

/* Orders the stream after the work that the other one has so far. */
static bool comesAfter(orStream_t stream, orStream_t other) {
  orEvent_t event = 0;
  int device, before;
  if (CALL(orStreamGetDevice(other, &device))) return false;
  ASSERT_OK(orGetDevice(&before));
  ASSERT_OK(orSetDevice(device));
  bool made = !CALL(orEventCreate(&event));
  CALL(orSetDevice(before));
  bool ordered =
      made && !CALL(orEventRecord(event, other)) && !CALL(orStreamWaitEvent(stream, event));
  if (made) ASSERT_OK(orEventDestroy(event));
  return ordered;
}

/* The memory, if work of the stream may use it; or null. */
static Object *usable(Object *memory, orStream_t stream) {
  bool foreign = memory && memory->handle && memory->handle != stream;
  return foreign && !comesAfter(stream, memory->handle) ? NULL : memory;
}

/* Cached memory of another stream is recorded after the work that uses it is queued. */
static void noteUse(const Object *memory, orStream_t stream) {
  if (memory && memory->handle && memory->handle != stream)
    CALL(orCacheRecordStream(memory->data, stream));
}

void launchPlain(void) {
  Object *stream = pin(PLAIN_STREAM), *memory = pinMemory();
  orStream_t on = plainStream(stream);
  Object *used = usable(memory, on);
  launchOn(on, used, false);
  noteUse(used, on);
  unpin(memory);
  unpin(stream);
}

static void hostFunction(void *user_data) {
  Account *account = user_data;
  if (orMemset(NULL, 0, 0) != orErrorNotPermitted)
    STRESS_FAIL("a call was not refused inside of a host function");
  if ((uintptr_t)account / sizeof *account % 4 == 0) touchBig();
  atomic_fetch_add(&account->ran, 1);
}

void launchHostFunction(void) {
  Object *stream = pin(PLAIN_STREAM);
  int index = nextIndex(&fuzz.function_count);
  bool plain = stream && oneIn(2);
  if (index >= 0) {
    Account *account = &fuzz.functions[index];
    account->captured = !plain;
    orStream_t on = plain ? plainStream(stream) : loose(STREAM);
    atomic_store(&account->queued, !CALL(orLaunchHostFunc(on, hostFunction, account)));
  }
  unpin(stream);
}

/* A copy or a fill, between bytes of the two that no other work touches. */
void copyOn(orStream_t stream, Object *to, Object *from) {
  char host[256];
  size_t bytes = 1 + below(oneIn(20) ? 100000 : 200);
  char *dst = takeBytes(to, bytes), *src = takeBytes(from, bytes);
  orMemcpyKind kind = oneIn(8) ? (orMemcpyKind)below(6) : orMemcpyDefault;
  if (!dst || !src) return;
  switch (below(6)) {
    case 0:
      CALL(orMemsetAsync(dst, (int)below(256), bytes, stream));
      break;
    case 1:
      if (bytes > sizeof host) break;
      memset(host, 1, sizeof host);
      CALL(orMemcpyAsync(dst, host, bytes, kind, stream));
      memset(host, 2, sizeof host);
      break;
    case 2:
      if (bytes > sizeof host) break;
      CALL(orMemcpyWithStream(host, src, bytes, kind, stream));
      break;
    case 3:
      CALL(orMemcpyPeerAsync(dst, anyDevice(), src, anyDevice(), bytes, stream));
      break;
    default:
      CALL(orMemcpyAsync(dst, src, bytes, kind, stream));
  }
}

void copyLoose(void) { copyOn(loose(STREAM), kept(), kept()); }

void copyPlain(void) {
  Object *stream = pin(PLAIN_STREAM), *to = pinMemory(), *from = pinMemory();
  orStream_t on = plainStream(stream);
  if (usable(to, on) && usable(from, on)) {
    copyOn(on, to, from);
    noteUse(to, on);
    noteUse(from, on);
  }
  unpin(from);
  unpin(to);
  unpin(stream);
}

void copyBlocking(void) {
  Object *o = pinMemory();
  size_t bytes = 1 + below(200);
  char host[200] = {0}, *at = takeBytes(usable(o, OR_STREAM_DEFAULT), bytes);
  if (at) {
    CALL(oneIn(2) ? orMemcpy(at, host, bytes, orMemcpyDefault)
                  : orMemcpy(host, at, bytes, orMemcpyDefault));
    CALL(orMemset(at, 3, bytes));
    noteUse(o, OR_STREAM_DEFAULT);
  }
  unpin(o);
}

void nap(void) {
  CALL(orLaunchSleep(oneIn(2) ? loose(STREAM) : atomic_load(&anyObject(PLAIN_STREAM)->handle),
                     below(30000)));
}

Object *kept(void) { return &fuzz.kept[below(DEVICE_COUNT + 1)]; }
