/*
 * The interface of capture.c, graph.c and graph_dot.c. Ownership: see the head of capture.c.
 */
#pragma once

#include "openreg_graph.h"

/* ---- capture.c ---- */

/* Reports to a tool, at each replay, what it stored in the capture. No lock held. */
typedef void orNodeReport(const void *args, orStream_t on);
typedef struct orNodeTool {
  orNodeReport *report;
  void (*destroy)(void *args); /* called once, with no lock held; may be null */
} orNodeTool;

/* A node of a capture or of a graph. */
struct orGraphNode {
  orGraphNode *next; /* in the order of the calls */
  uint32_t branch;
  bool awaited;                /* of an event's record: some wait is for it */
  orGraphNode *record;         /* of a wait: the record it is for */
  void (*destroy)(void *args); /* destroys the task's arguments; called once */
  orNodeReport *report;        /* not null: it is never queued; called when the other nodes are */
  _Alignas(16) orTask task;    /* its arguments follow */
};
typedef struct orGraphNodes {
  orGraphNode *first, **end;
} orGraphNodes;
/* Null if memory is short. */
orGraphNode *orGraphNodeNew(size_t args_size);
/* Destroys all nodes. No lock held. */
void orGraphNodesFree(orGraphNodes *nodes);

/* For a stream whose lock is held. */

/* Whether the stream captures. The functions up to orCaptureRefuse require it. */
bool orCaptureHolds(orStream *s);
/* A record to fill, which becomes a node instead of a task in the queue. */
orError_t orCaptureReserve(orStream *s, size_t args_size, orTask **task);
/* False if the task is not the reserved one, but one for the queue. */
bool orCaptureCommit(orStream *s, const orTask *task);
/* The cell stands for what the stream has captured so far. */
orError_t orCaptureRecord(orStream *s, orCell *cell);
/* Called if the stream or the cell is in a capture: the stream joins it, or is refused. */
orError_t orCaptureWait(orStream *s, orCell *cell);
/* For a call that no graph can repeat: invalidates the capture and unlocks the stream. `instead`:
 * what the caller can do instead. */
orError_t orCaptureRefuse(orStream *s, const char *call, const char *instead);
/* Takes a stream that is being destroyed out of its capture. Pass the result, which may be null, to
 * orCaptureAbandon with no lock held. */
orCapture *orCaptureLeave(orStream *s);
void orCaptureAbandon(orCapture *capture);
enum { OR_MOST_BRANCHES = 64 };
typedef struct orCaptured {
  int device;
  uint32_t branches;
  int priorities[OR_MOST_BRANCHES];
  orGraphNode *nodes; /* passed to the caller */
} orCaptured;
/* Ends the capture that began on the stream; no lock held. */
orError_t orCaptureEnd(orStream_t stream, orCaptured *captured);
/* Invalidates the capture of a cell that has one. */
orError_t orCaptureRefuseEvent(const orCell *cell, const char *call);
/* Called when a cell is freed. */
void orCaptureForget(orCell *cell);
/* Invalidates all captures of a device; fails if there are any. */
void orCapturesInvalidate(int device, const char *call);
orError_t orCapturesRefuse(int device, const char *call);
/* How many captures have ended, of all devices. */
uint64_t orCapturesEnded(void);
/* The stream's active capture, with a reference for the caller, or null. No lock of streams
 * held. */
orCapture *orStreamCapture(orStream_t stream);
void orCaptureRelease(orCapture *capture);
bool orCaptureIsOver(orCapture *capture);
bool orStreamCaptures(orStream_t stream);
/* Whether the stream captures; if so, the arguments are copied into a node, which is `kept` unless
 * the host is short of memory. No lock held. */
bool orCaptureReport(orStream_t stream, const orNodeTool *tool, const void *args, size_t size,
                     bool *kept);

/* ---- graph_dot.c ---- */

/* Draws a graph's nodes. The slots of their records and waits number their cells, all below
 * `cells`. */
orError_t orGraphDraw(int device, const orGraphNodes *nodes, uint32_t lines, uint32_t cells,
                      const char *path);
