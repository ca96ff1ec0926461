/*
 * Random calls about streams, events, devices and graphs: see fuzz.h.
 */
#include "fuzz.h"
#include "soak.h"

static _Atomic uint64_t pool_streams[OPENREG_STREAMS_PER_POOL * 4 * DEVICE_COUNT];

void makeStream(void) {
  Object *o = freePlace(oneIn(2) ? STREAM : PLAIN_STREAM);
  orStream_t stream = 0;
  if (!o) return;
  if (CALL(orStreamCreateWithPriority(&stream, (int)below(12) - 8)))
    leavePlace(o);
  else
    fillPlace(o, stream, NULL, 0);
}

void endStream(void) {
  Object *o = takeAway(oneIn(2) ? STREAM : PLAIN_STREAM);
  if (!o) return;
  ASSERT_OK(orStreamDestroy(o->handle));
  ASSERT_ERROR(orStreamDestroy(o->handle), orErrorInvalidResourceHandle);
  leavePlace(o);
}

static void notePoolStream(orStream_t stream) {
  for (size_t i = 0; i < sizeof pool_streams / sizeof *pool_streams; i++) {
    uint64_t none = 0;
    if (atomic_compare_exchange_strong(&pool_streams[i], &none, stream) || none == stream) return;
  }
}

unsigned sharedStreams(void) {
  unsigned count = 0;
  for (size_t i = 0; i < sizeof pool_streams / sizeof *pool_streams; i++)
    count += pool_streams[i] != 0;
  return count;
}

orStream_t plainStream(const Object *pinned) {
  orStream_t stream = 0;
  if (pinned && !oneIn(5)) return pinned->handle;
  if (oneIn(2)) return OR_STREAM_DEFAULT;
  if (!CALL(orStreamGetFromPool(&stream, -(int)below(3), (int)below(DEVICE_COUNT))))
    notePoolStream(stream);
  return stream;
}

/* The library's own streams are not the caller's to destroy. */
static void tryToEnd(orStream_t stream) {
  orError_t error = stream ? CALL(orStreamDestroy(stream)) : orErrorInvalidValue;
  if (error != orErrorInvalidValue)
    STRESS_FAIL("orStreamDestroy took stream 0x%" PRIx64 ", which is shared", stream);
}

void misuseStream(void) {
  orStream_t stream = 0;
  CALL(orStreamGetDefault(&stream, (int)below(DEVICE_COUNT)));
  tryToEnd(stream);
  tryToEnd(pool_streams[below(sizeof pool_streams / sizeof *pool_streams)]);
  if (!CALL(orStreamDestroy(draw())))
    STRESS_FAIL("orStreamDestroy took a number that is no handle");
}

void makeEvent(void) {
  Object *o = freePlace(oneIn(2) ? EVENT : PLAIN_EVENT);
  orEvent_t event = 0;
  if (!o) return;
  if (CALL(orEventCreateWithFlags(&event, below(2))))
    leavePlace(o);
  else
    fillPlace(o, event, NULL, 0);
}

void endEvent(void) {
  Object *o = takeAway(oneIn(2) ? EVENT : PLAIN_EVENT);
  if (!o) return;
  ASSERT_OK(orEventDestroy(o->handle));
  ASSERT_ERROR(orEventQuery(o->handle), orErrorInvalidResourceHandle);
  leavePlace(o);
}

void recordEvent(void) {
  Object *stream = pin(PLAIN_STREAM), *event = pin(PLAIN_EVENT);
  if (oneIn(2))
    CALL(orEventRecord(loose(EVENT), loose(STREAM)));
  else if (stream && event)
    CALL(orEventRecord(event->handle, plainStream(stream)));
  unpin(event);
  unpin(stream);
}

void waitForEvent(void) {
  Object *stream = pin(PLAIN_STREAM), *event = pin(PLAIN_EVENT);
  if (oneIn(2))
    CALL(orStreamWaitEvent(loose(STREAM), loose(EVENT)));
  else if (stream && event)
    CALL(orStreamWaitEvent(plainStream(stream), event->handle));
  unpin(event);
  unpin(stream);
}

/* keepGates completes the event. */
void waitForGate(void) {
  orEvent_t gate = 0;
  uint64_t none = 0;
  Object *stream = pin(PLAIN_STREAM);
  _Atomic uint64_t *place = &fuzz.gate[below(OPEN_GATES)];
  if (!*place && !CALL(orEventCreateWithFlags(&gate, orEventExternal))) {
    CALL(orStreamWaitEvent(oneIn(4) || !stream ? loose(STREAM) : stream->handle, gate));
    if (!atomic_compare_exchange_strong(place, &none, gate)) ASSERT_OK(orEventDestroy(gate));
  }
  unpin(stream);
}

void ask(void) {
  int n;
  float ms;
  orCaptureStatus status;
  size_t count;
  uint64_t id;
  switch (below(8)) {
    case 0:
      CALL(orStreamGetDevice(guess(STREAM), &n));
      break;
    case 1:
      CALL(orStreamGetPriority(guess(STREAM), &n));
      break;
    case 2:
      CALL(orStreamQuery(guess(STREAM)));
      break;
    case 3:
      CALL(orEventQuery(guess(EVENT)));
      break;
    case 4:
      CALL(orEventElapsedTime(&ms, guess(EVENT), guess(EVENT)));
      break;
    case 5:
      CALL(orStreamGetCaptureInfo(guess(STREAM), &status, oneIn(2) ? &id : NULL));
      break;
    case 6:
      CALL(orGraphGetNodeCount(guess(GRAPH), &count));
      break;
    default:
      CALL(orStreamQuery(atomic_load(&anyObject(PLAIN_STREAM)->handle)));
  }
}

void synchronize(void) {
  switch (below(6)) {
    case 0:
      CALL(orStreamSynchronize(loose(STREAM)));
      break;
    case 1:
      CALL(orEventSynchronize(loose(EVENT)));
      break;
    case 2:
      if (oneIn(4)) CALL(orDeviceSynchronize());
      break;
    case 3:
      CALL(orEventSynchronize(atomic_load(&anyObject(PLAIN_EVENT)->handle)));
      break;
    default:
      CALL(orStreamSynchronize(atomic_load(&anyObject(PLAIN_STREAM)->handle)));
  }
}

void useDevice(void) {
  orDeviceProperties properties = {.size = sizeof properties};
  int device = anyDevice(), can;
  CALL(orSetDevice(device));
  CALL(orGetDeviceProperties(&properties, device));
  CALL(orDeviceCanAccessPeer(&can, device, anyDevice()));
  CALL(orDeviceEnablePeerAccess(device, anyDevice()));
}

void reset(void) {
  if (!oneIn(3)) return;
  atomic_fetch_add(&fuzz.resets, 1);
  CALL(orDeviceReset());
}

/* ---- graphs ---- */

static void destroyObject(void *object) {
  Account *account = object;
  touchBig();
  atomic_fetch_add(&account->dropped, 1);
}

static void retainObject(orGraph_t graph) {
  int index = nextIndex(&fuzz.object_count);
  if (index < 0) return;
  atomic_store(&fuzz.objects[index].queued,
               !CALL(orGraphRetainUserObject(graph, &fuzz.objects[index], destroyObject)));
}

void beginSomeCapture(void) {
  orStream_t stream = loose(STREAM);
  CALL(orStreamBeginCapture(stream));
}

static void keepGraph(orGraph_t graph) {
  Object *o = freePlace(GRAPH);
  if (o)
    fillPlace(o, graph, NULL, 0);
  else
    ASSERT_OK(orGraphDestroy(graph));
}

static void endCaptureOn(orStream_t stream) {
  orGraph_t graph = 0;
  orError_t error = CALL(orStreamEndCapture(stream, &graph));
  if (!error != !!graph)
    STRESS_FAIL("orStreamEndCapture: %s, and graph 0x%" PRIx64, orGetErrorName(error), graph);
  if (graph) keepGraph(graph);
}

void endSomeCapture(void) { endCaptureOn(loose(STREAM)); }

/* A fork and a join in a capture: single random calls seldom make one. */
void captureBoth(void) {
  orStream_t origin = loose(STREAM), branch = loose(STREAM);
  orEvent_t fork = loose(EVENT), join = loose(EVENT);
  if (CALL(orStreamBeginCapture(origin))) return;
  launchOn(origin, kept(), true);
  if (!CALL(orEventRecord(fork, origin))) CALL(orStreamWaitEvent(branch, fork));
  launchOn(branch, kept(), true);
  copyOn(origin, kept(), kept());
  if (!CALL(orEventRecord(join, branch))) CALL(orStreamWaitEvent(origin, join));
  if (!oneIn(8)) endCaptureOn(origin);
}

void launchGraph(void) {
  atomic_fetch_add(&fuzz.launches, 1);
  CALL(orGraphReplay(loose(GRAPH), loose(STREAM)));
}

void endGraph(void) {
  Object *o = takeAway(GRAPH);
  if (!o) return;
  ASSERT_OK(orGraphDestroy(o->handle));
  leavePlace(o);
}

void useGraph(void) {
  if (oneIn(2))
    retainObject(loose(GRAPH));
  else
    CALL(orStreamRefuseCapture(loose(STREAM), "the fuzzer", "do something else"));
}
