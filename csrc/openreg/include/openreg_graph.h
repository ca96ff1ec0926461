/*
 * Graphs: a stream's work, captured once and replayed any number of times.
 *
 * What any thread queues on a capturing stream is not run but kept as the nodes of a graph:
 * kernels, copies and fills, host functions. A stream of the same device that waits for an event
 * recorded in the capture joins it. Arguments are copied when a node is made, and destroyed once,
 * when the graph is gone and no replay of it runs. A kernel may run any number of times, on one
 * thread at a time. Addresses stay the same, and the caller keeps the memory there allocated.
 *
 * Calls that no graph can repeat return orErrorStreamCaptureUnsupported and invalidate the capture:
 * querying or synchronising a capturing stream or its device, copies from and to pageable memory,
 * and calls that wait for their result. Other errors that invalidate it: querying a captured event
 * (orErrorCapturedEvent), waiting for an event from outside (orErrorStreamCaptureIsolation), and a
 * wait between two captures (orErrorStreamCaptureMerge). An invalidated capture accepts nothing
 * more (orErrorStreamCaptureInvalidated) until orStreamEndCapture ends it. Its streams are then as
 * they were before.
 */
#ifndef OPENREG_GRAPH_H
#define OPENREG_GRAPH_H

#include "openreg.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef uint64_t orGraph_t;

typedef enum orCaptureStatus {
  orCaptureStatusNone = 0,
  orCaptureStatusActive = 1,
  orCaptureStatusInvalidated = 2
} orCaptureStatus;

/* Begins a capture. The stream is not a default stream, a graph's own, or one that is capturing. */
OR_API orError_t orStreamBeginCapture(orStream_t stream);
/* Ends the capture, on the stream on which it began. If a stream that has joined has work that does
 * not come before the end, returns orErrorStreamCaptureUnjoined. On failure *graph is 0 and the
 * capture has ended all the same, except for orErrorStreamCaptureUnmatched. */
OR_API orError_t orStreamEndCapture(orStream_t stream, orGraph_t *graph);
/* `id`, which may be null, is a number that only this capture has, now or later; 0 without one. */
OR_API orError_t orStreamGetCaptureInfo(orStream_t stream, orCaptureStatus *status, uint64_t *id);
/* For a layer above, before it queues work that no graph can repeat: if the stream is capturing,
 * invalidates the capture in the name of `call` and returns orErrorStreamCaptureUnsupported. The
 * message recommends `instead`. */
OR_API orError_t orStreamRefuseCapture(orStream_t stream, const char *call, const char *instead);
/* Asynchronous. Queues the graph's nodes on a stream of its device as one piece. Streams that
 * joined the capture run beside it, on streams of the graph's own with the same priorities. Replays
 * of one graph run one after the other. Sleeps while the stream's queue is full. */
OR_API orError_t orGraphReplay(orGraph_t graph, orStream_t stream);
/* The handle becomes invalid at once; queued replays still run. Never blocks. */
OR_API orError_t orGraphDestroy(orGraph_t graph);
/* The number of nodes, without records of events and waits. */
OR_API orError_t orGraphGetNodeCount(orGraph_t graph, size_t *count);
/* Writes the graph's nodes, streams and edges in DOT to `path`. orErrorSystem names the file that
 * could not be written. */
OR_API orError_t orGraphDebugDotPrint(orGraph_t graph, const char *path);
/* destroy(object) is called once, after the nodes' arguments have been destroyed, on any thread. It
 * may not call this API. */
OR_API orError_t orGraphRetainUserObject(orGraph_t graph, void *object,
                                         void (*destroy)(void *object));

/* For owners of graphs that can be captured again. Called if an allocation on `device` would be
 * refused although all cached memory has been given back. `hook` destroys some of the graphs and
 * releases their pools, or returns 0 if there are none; otherwise the allocator waits for queued
 * work and tries again. It is called with no lock held, on the allocating thread and outside of
 * tasks; it may not allocate on the device. Null switches it off. */
OR_API orError_t orSetShortageHook(int (*hook)(int device));

#ifdef __cplusplus
}
#endif

#endif
