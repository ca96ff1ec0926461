/*
 * What capture.c and graph.c offer the other files. The head of capture.c says who owns what.
 */
#ifndef OPENREG_PRIVATE_GRAPH_H
#define OPENREG_PRIVATE_GRAPH_H

#include "openreg_graph.h"

/* ---- capture.c ---- */

/* Reports to a tool, at each replay of a graph, what it has kept in the capture; no lock held. */
typedef void orNodeReport(const void *args, orStream_t on);

/* A record of a capture, or of a graph. */
struct orGraphNode {
  orGraphNode *next; /* in the order of the calls */
  uint32_t branch;
  bool awaited;                /* an event's record: some wait is for it */
  orGraphNode *record;         /* a wait: for it */
  void (*destroy)(void *args); /* of the task's arguments, called once */
  orNodeReport *report;        /* not null: it is never queued, and called when others are */
  _Alignas(16) orTask task;    /* its arguments follow */
};
typedef struct orGraphNodes {
  orGraphNode *first, **end;
} orGraphNodes;
/* Lets go of all. No lock held. */
void orGraphNodesFree(orGraphNodes *nodes);

/* Of a stream, whose lock is held. */

/* Whether it captures; the functions up to orCaptureRefuse are for one that does. */
bool orCaptureHolds(orStream *s);
/* A record to fill, in place of one in the queue. */
orError_t orCaptureReserve(orStream *s, size_t args_size, orTask **task);
/* False: the task is not the reserved one, and the queue's. */
bool orCaptureCommit(orStream *s, const orTask *task);
/* The cell stands for what the stream has captured so far. */
orError_t orCaptureRecord(orStream *s, orCell *cell);
/* The stream or the cell is in a capture: the stream is from now on, or is refused. */
orError_t orCaptureWait(orStream *s, orCell *cell);
/* For a call that no graph can repeat: invalidates the capture, and unlocks the stream. `instead`:
 * what to do instead. */
orError_t orCaptureRefuse(orStream *s, const char *call, const char *instead);
/* A stream that is destroyed leaves. The result, which may be null, is for orCaptureAbandon, with
 * no lock held. */
orCapture *orCaptureLeave(orStream *s);
void orCaptureAbandon(orCapture *capture);
enum { OR_MOST_BRANCHES = 64 };
typedef struct orCaptured {
  int device;
  uint32_t branches;
  int priorities[OR_MOST_BRANCHES];
  orGraphNode *nodes; /* the caller's */
} orCaptured;
/* Ends the capture that began on the stream; no lock held. */
orError_t orCaptureEnd(orStream_t stream, orCaptured *captured);
/* Of a cell with a capture: invalidates it. */
orError_t orCaptureRefuseEvent(const orCell *cell, const char *call);
/* Of a cell that is freed. */
void orCaptureForget(orCell *cell);
/* All of a device's are invalidated; and that is refused, if there are any. */
void orCapturesInvalidate(int device, const char *call);
orError_t orCapturesRefuse(int device, const char *call);
/* Whether any stream of the device may be capturing. */
bool orDeviceCaptures(int device);
/* How many have ended, of all devices. */
uint64_t orCapturesEnded(void);
/* No lock of streams held. The capture that a stream is in, with a reference for the caller; null
 * if it is in none, or no more. */
orCapture *orStreamCapture(orStream_t stream);
void orCaptureRelease(orCapture *capture);
bool orCaptureIsOver(orCapture *capture);
bool orStreamCaptures(orStream_t stream);
/* Whether the stream captures; no lock held. If so, the arguments are kept, as a node. */
bool orCaptureReport(orStream_t stream, orNodeReport *report, const void *args, size_t size);

/* ---- graph_dot.c ---- */

/* Of a graph's nodes, whose records and waits have the numbers of their cells, all below
 * `cells`. */
orError_t orGraphDraw(int device, const orGraphNodes *nodes, uint32_t lines, uint32_t cells,
                      const char *path);

#endif
