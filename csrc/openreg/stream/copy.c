/*
 * Copies and fills: what is checked when they are queued, and how the bytes move when they run.
 *
 * A pageable source of OR_STAGE_BYTES or less is copied into the queue with the task, so the caller
 * may overwrite it at once. A larger one is read in place, and the call returns when it has been
 * read. A pageable destination has been written when the call returns. All else is asynchronous. A
 * large copy runs in pieces (parallel_for.c).
 */
#include <string.h>

#include "stream/stream.h"

enum { OR_STAGE_BYTES = 64 << 10 };

/* ---- checks ---- */

typedef struct orPlace {
  bool known; /* the region is valid: device or pinned memory */
  orRegion region;
} orPlace;

static const char *memoryName(const orPlace *p) {
  return !p->known                              ? "pageable host"
         : p->region.type == orMemoryTypeDevice ? "device"
                                                : "pinned host";
}

static bool onDevice(const orPlace *p) { return p->known && p->region.type == orMemoryTypeDevice; }

static orError_t locate(const char *what, const void *ptr, size_t bytes, orPlace *place) {
  if (!ptr) return orFail(orErrorInvalidValue, "%s: null pointer", what);
  place->known = orRegionFind(ptr, &place->region);
  if (!place->known)
    return orSimulatedHolds(ptr)
               ? orFail(orErrorInvalidValue, "%s: %p is device memory that is not allocated", what,
                        ptr)
               : orSuccess;
  size_t room = place->region.size - (size_t)((const char *)ptr - (const char *)place->region.base);
  if (bytes <= room) return orSuccess;
  return orFail(orErrorInvalidValue,
                "%s: [%p, +%zu) ends %zu bytes past its %s allocation [%p, +%zu)", what, ptr, bytes,
                bytes - room, memoryName(place), place->region.base, place->region.size);
}

static orError_t checkKind(orMemcpyKind *kind, const orPlace *dst, const orPlace *src) {
  orMemcpyKind is = (orMemcpyKind)((onDevice(src) ? 2 : 0) + (onDevice(dst) ? 1 : 0));
  if (*kind == orMemcpyDefault) *kind = is;
  if (*kind == is) return orSuccess;
  return orFail(orErrorInvalidMemcpyDirection,
                "copy kind %d does not match a copy from %s to %s memory", (int)*kind,
                memoryName(src), memoryName(dst));
}

/* ---- queueing ---- */

static const char *copyName(orMemcpyKind kind) {
  static const char *const names[] = {"Memcpy HtoH", "Memcpy HtoD", "Memcpy DtoH", "Memcpy DtoD"};
  OR_COVERS(names, orMemcpyDefault);
  return names[kind];
}

static orError_t queueCopy(const orCopyArgs *args, bool stage, orWaitMode waits,
                           orStream_t stream) {
  orStream *s;
  orTask *t;
  OR_TRY(orStreamBegin(stream, true, stage ? args->bytes : 0, &s, &t));
  if (OR_UNLIKELY(stage || waits) && s->capturing)
    return orCaptureRefuse(s, copyName(args->kind),
                           stage ? "copy from device or pinned memory" : "it waits for the bytes");
  t->kind = OR_KIND_COPY;
  t->name = copyName(args->kind);
  t->u.copy = *args;
  t->any_thread = orTaskAnyThread(args->device);
  if (stage) {
    memcpy(orTaskArgs(t), args->src, args->bytes);
    t->u.copy.src = NULL;
  }
  return orStreamSubmit(s, t, waits);
}

/* The stream's own device is checked when the copy is queued. */
static orError_t checkPlace(const orPlace *place, int stream_device) {
  return onDevice(place) && place->region.device != stream_device
             ? orDeviceCheckLost(place->region.device)
             : orSuccess;
}

static orError_t copyAsync(void *dst, const void *src, size_t bytes, orMemcpyKind kind,
                           orStream_t stream, bool blocking) {
  orPlace to, from;
  OR_TRY(orEnterBlocking());
  if ((unsigned)kind > orMemcpyDefault)
    return orFail(orErrorInvalidValue, "copy kind %d is out of range: 0 to 4", (int)kind);
  int device;
  OR_TRY(orStreamGetDevice(stream, &device));
  if (!bytes) return blocking ? orStreamSynchronize(stream) : orSuccess;
  OR_TRY(locate("copy destination", dst, bytes, &to));
  OR_TRY(locate("copy source", src, bytes, &from));
  OR_TRY(checkKind(&kind, &to, &from));
  OR_TRY(checkPlace(&to, device));
  OR_TRY(checkPlace(&from, device));
  orCopyArgs args = {.dst = dst,
                     .src = src,
                     .bytes = bytes,
                     .kind = kind,
                     .device = onDevice(&to)     ? to.region.device
                               : onDevice(&from) ? from.region.device
                                                 : -1};
  OR_PROBE(OR_PROBE_ACCESS, .call = blocking ? "orMemcpy" : "orMemcpyAsync", .stream = stream,
           .dst = to.known ? dst : NULL, .src = from.known ? src : NULL, .bytes = bytes);
  bool stage = !blocking && !from.known && to.known && bytes <= OR_STAGE_BYTES;
  /* The call returns when a pageable source has been read, which is no promise that the copy is
   * done. */
  orWaitMode waits = blocking || !to.known   ? OR_WAIT_PROMISED
                     : !from.known && !stage ? OR_WAIT_UNASKED
                                             : OR_WAIT_NOT;
  return queueCopy(&args, stage, waits, stream);
}

orError_t orMemcpyAsync(void *dst, const void *src, size_t bytes, orMemcpyKind kind,
                        orStream_t stream) {
  return copyAsync(dst, src, bytes, kind, stream, false);
}

orError_t orMemcpyWithStream(void *dst, const void *src, size_t bytes, orMemcpyKind kind,
                             orStream_t stream) {
  return copyAsync(dst, src, bytes, kind, stream, true);
}

orError_t orMemcpy(void *dst, const void *src, size_t bytes, orMemcpyKind kind) {
  return copyAsync(dst, src, bytes, kind, OR_STREAM_DEFAULT, true);
}

static orError_t checkOwner(const char *what, const void *ptr, int device) {
  orRegion r;
  OR_TRY(orDeviceCheck(device));
  if (orRegionFind(ptr, &r) && r.type == orMemoryTypeDevice && r.device == device) return orSuccess;
  return orFail(orErrorInvalidValue, "%s: %p is not memory of device %d", what, ptr, device);
}

orError_t orMemcpyPeerAsync(void *dst, int dst_device, const void *src, int src_device,
                            size_t bytes, orStream_t stream) {
  OR_TRY(orEnterBlocking());
  if (bytes) {
    OR_TRY(checkOwner("peer copy destination", dst, dst_device));
    OR_TRY(checkOwner("peer copy source", src, src_device));
  }
  return copyAsync(dst, src, bytes, orMemcpyDeviceToDevice, stream, false);
}

static orError_t setAsync(void *dst, int value, size_t bytes, orStream_t stream, bool blocking) {
  orPlace to;
  orStream *s;
  orTask *t;
  OR_TRY(orEnterBlocking());
  int device;
  OR_TRY(orStreamGetDevice(stream, &device));
  if (!bytes) return blocking ? orStreamSynchronize(stream) : orSuccess;
  OR_TRY(locate("memset", dst, bytes, &to));
  OR_TRY(checkPlace(&to, device));
  if (!to.known)
    return orFail(orErrorInvalidValue, "memset: %p is not in device or pinned memory", dst);
  OR_PROBE(OR_PROBE_ACCESS, .call = blocking ? "orMemset" : "orMemsetAsync", .stream = stream,
           .dst = dst, .bytes = bytes);
  OR_TRY(orStreamBegin(stream, true, 0, &s, &t));
  t->kind = OR_KIND_SET;
  t->name = "Memset";
  t->u.set = (orSetArgs){dst, bytes, value, onDevice(&to) ? to.region.device : -1};
  t->any_thread = orTaskAnyThread(t->u.set.device);
  return orStreamSubmit(s, t, blocking ? OR_WAIT_PROMISED : OR_WAIT_NOT);
}

orError_t orMemset(void *dst, int value, size_t bytes) {
  return setAsync(dst, value, bytes, OR_STREAM_DEFAULT, true);
}

orError_t orMemsetAsync(void *dst, int value, size_t bytes, orStream_t stream) {
  return setAsync(dst, value, bytes, stream, false);
}
