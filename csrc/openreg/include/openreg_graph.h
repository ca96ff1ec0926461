/*
 * Graphs: a stream's work, captured once and launched again and again.
 *
 * What is queued on a capturing stream, by any thread, is not run but kept as the nodes of a graph,
 * which can be launched again and again: kernels, copies and fills, host functions. A stream
 * of the same device that waits for an event recorded in the capture joins it. Arguments are copied
 * when a node is made, and dropped once, when the graph is gone and no launch of it runs: a kernel
 * may be run any number of times, by one thread at a time. Addresses stay what they were, and the
 * memory there is the caller's to keep.
 *
 * What no graph can repeat is refused with orErrorStreamCaptureUnsupported, which ends the capture
 * (it is invalidated): to query or synchronise a capturing stream or its device, copies from and to
 * pageable memory, and what waits for its result. So does asking for a captured event
 * (orErrorCapturedEvent), waiting for one from outside (orErrorStreamCaptureIsolation), and a wait
 * between two captures (orErrorStreamCaptureMerge). An invalidated capture takes nothing more
 * (orErrorStreamCaptureInvalidated) until orStreamEndCapture ends it, after which its streams are
 * as they were before.
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

/* Not a default stream, nor a graph's own, nor one that is capturing. */
OR_API orError_t orStreamBeginCapture(orStream_t stream);
/* On the stream on which it began. The work of streams that have joined must come before what this
 * one would do next: orErrorStreamCaptureUnjoined. On failure *graph is 0 and the capture has
 * ended all the same, except for orErrorStreamCaptureUnmatched. */
OR_API orError_t orStreamEndCapture(orStream_t stream, orGraph_t *graph);
/* `id`, which may be null: the capture's, which no other has or had; 0 without one. */
OR_API orError_t orStreamGetCaptureInfo(orStream_t stream, orCaptureStatus *status, uint64_t *id);
/* For a layer above, before it queues what no graph can repeat: orErrorStreamCaptureUnsupported if
 * the stream is capturing, whose capture `call` has invalidated then; `instead` says what to do. */
OR_API orError_t orStreamRefuseCapture(orStream_t stream, const char *call, const char *instead);
/* Asynchronous: queues the graph's nodes on a stream of its device as one piece; what joined the
 * capture runs beside it, on streams of the graph's own with the priorities of those that joined.
 * Launches of one graph run one after the other. Blocks, asleep, while the stream's queue is
 * full. */
OR_API orError_t orGraphReplay(orGraph_t graph, orStream_t stream);
/* The handle is invalid at once; what is launched still runs. Never blocks. */
OR_API orError_t orGraphDestroy(orGraph_t graph);
/* Without records of events and waits. */
OR_API orError_t orGraphGetNodeCount(orGraph_t graph, size_t *count);
/* Writes the graph's nodes, streams and edges in DOT to `path`. orErrorSystem names the file that
 * could not be written. */
OR_API orError_t orGraphDebugDotPrint(orGraph_t graph, const char *path);
/* destroy(object) is called once, after the nodes' arguments have been dropped; any thread, may not
 * call this API. */
OR_API orError_t orGraphRetainUserObject(orGraph_t graph, void *object,
                                         void (*destroy)(void *object));

/* For graphs that their owner can capture again. Where an allocation on `device` would be refused,
 * with all that is cached given back, `hook` destroys some of them and lets go of their pools, or
 * returns 0 if there are none; otherwise the allocator waits for queued work and tries again.
 * Called under no lock, on the thread that allocates and outside of tasks; it may not allocate
 * there. Null switches it off. */
OR_API orError_t orSetShortageHook(int (*hook)(int device));

#ifdef __cplusplus
}
#endif

#endif
