/*
 * Writes a graph's nodes, streams and edges in DOT.
 *
 * Events' records and waits become edges. `after` has a row for each stream, then one for each
 * cell. A row has for each stream 1 + the number of its latest node that comes directly before, or
 * 0.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "stream/stream.h"

typedef struct orBox {
  const orGraphNode *node;
  size_t edges; /* the first edge that leads here */
} orBox;

typedef struct orDrawing {
  int device;
  uint32_t lines, count;
  orBox *boxes; /* `count`, and one more with the end of the edges */
  uint32_t *from;
  size_t room;
} orDrawing;

/* ---- edges ---- */

static bool isShown(const orGraphNode *n) {
  return !n->report && n->task.kind != OR_KIND_RECORD && n->task.kind != OR_KIND_WAIT;
}

static bool addEdge(orDrawing *d, uint32_t from) {
  size_t used = d->boxes[d->count + 1].edges;
  if (used == d->room) {
    d->room = 2 * d->room + 64;
    uint32_t *larger = realloc(d->from, d->room * sizeof *larger);
    if (!larger) return false;
    d->from = larger;
  }
  d->from[used] = from;
  d->boxes[d->count + 1].edges++;
  return true;
}

static bool addBox(orDrawing *d, const orGraphNode *n, uint32_t *after) {
  orBox *box = &d->boxes[d->count];
  box->node = n;
  box[1].edges = box->edges;
  for (uint32_t line = 0; line < d->lines; line++) {
    if (after[line] && !addEdge(d, after[line] - 1)) return false;
    after[line] = 0;
  }
  after[n->branch] = ++d->count;
  return true;
}

static bool addNode(orDrawing *d, const orGraphNode *n, uint32_t *rows) {
  uint32_t *after = rows + (size_t)n->branch * d->lines;
  if (n->report) return true;
  if (isShown(n)) return addBox(d, n, after);
  uint32_t *cell = rows + (size_t)(d->lines + n->task.u.slot) * d->lines;
  if (n->task.kind == OR_KIND_RECORD) memcpy(cell, after, d->lines * sizeof *cell);
  for (uint32_t line = 0; line < d->lines; line++)
    if (after[line] < cell[line]) after[line] = cell[line];
  return true;
}

static bool addAll(orDrawing *d, const orGraphNodes *nodes, uint32_t cells) {
  size_t count = 0;
  for (const orGraphNode *n = nodes->first; n; n = n->next) count += isShown(n);
  d->boxes = calloc(count + 1, sizeof *d->boxes);
  uint32_t *after = calloc((size_t)(d->lines + cells) * d->lines, sizeof *after);
  bool made = d->boxes && after;
  for (const orGraphNode *n = nodes->first; n && made; n = n->next) made = addNode(d, n, after);
  free(after);
  return made;
}

/* ---- texts ---- */

/* Bytes outside ASCII are escaped, so that a name that is no UTF-8 does not break the file. */
static void writeText(FILE *file, const char *text) {
  for (const char *c = text; *c; c++)
    if (*c < ' ' || *c > '~')
      fprintf(file, "\\\\x%02x", (unsigned char)*c);
    else
      fprintf(file, strchr("\"\\", *c) ? "\\%c" : "%c", *c);
}

static void writeDetail(FILE *file, const orTask *t) {
  if (t->kind == OR_KIND_COPY)
    fprintf(file, "%zu bytes", t->u.copy.bytes);
  else if (t->kind == OR_KIND_SET)
    fprintf(file, "%zu bytes = %d", t->u.set.bytes, t->u.set.value);
  else
    fputs(t->kind == OR_KIND_HOST_FUNC ? "host function" : "kernel", file);
}

static const char *colourOf(orTaskKind kind) {
  static const char *const colours[] = {[OR_KIND_KERNEL] = "#dbe9f6",
                                        [OR_KIND_HOST_FUNC] = "#f6dcdc",
                                        [OR_KIND_COPY] = "#e0f0d8",
                                        [OR_KIND_SET] = "#fcf0d0"};
  OR_COVERS(colours, OR_KIND_SET + 1);
  return colours[kind];
}

/* ---- DOT ---- */

static void writeDotStream(FILE *file, const orDrawing *d, uint32_t line) {
  fprintf(file, "  subgraph cluster_%" PRIu32 " {\n    label=\"stream %" PRIu32 "\";\n", line,
          line);
  for (uint32_t i = 0; i < d->count; i++) {
    const orTask *t = &d->boxes[i].node->task;
    if (d->boxes[i].node->branch != line) continue;
    fprintf(file, "    n%" PRIu32 " [label=\"%" PRIu32 " ", i, i);
    writeText(file, t->name);
    fputs("\\n", file);
    writeDetail(file, t);
    fprintf(file, "\", fillcolor=\"%s\"];\n", colourOf(t->kind));
  }
  fputs("  }\n", file);
}

static void writeDot(FILE *file, const orDrawing *d) {
  fprintf(file, "digraph graph_of_openreg {\n  comment=\"device %d\";\n  rankdir=LR;\n", d->device);
  fputs("  node [shape=box, style=filled, fontname=\"monospace\", fontsize=10];\n", file);
  for (uint32_t line = 0; line < d->lines; line++) writeDotStream(file, d, line);
  for (uint32_t i = 0; i < d->count; i++)
    for (size_t e = d->boxes[i].edges; e < d->boxes[i + 1].edges; e++)
      fprintf(file, "  n%" PRIu32 " -> n%" PRIu32 ";\n", d->from[e], i);
  fputs("}\n", file);
}

/* ---- files ---- */

static orError_t writeFile(const char *path, const orDrawing *d) {
  FILE *file = fopen(path, "we");
  bool written = file;
  if (file) {
    writeDot(file, d);
    written = !ferror(file);
    written &= !fclose(file);
  }
  return written ? orSuccess
                 : orFail(orErrorSystem, "cannot write \"%s\": %s", path, strerror(errno));
}

orError_t orGraphDraw(int device, const orGraphNodes *nodes, uint32_t lines, uint32_t cells,
                      const char *path) {
  orDrawing d = {.device = device, .lines = lines};
  orError_t error = addAll(&d, nodes, cells)
                        ? writeFile(path, &d)
                        : orFail(orErrorMemoryAllocation, "no memory to draw a graph");
  free(d.boxes);
  free(d.from);
  return error;
}
