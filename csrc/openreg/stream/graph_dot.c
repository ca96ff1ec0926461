/*
 * A graph for people: its nodes, streams and edges as DOT, and as a picture in SVG.
 *
 * A node's column is one more than the highest of those that it comes after, so time goes to the
 * right. A picture is OR_BAND columns wide: what comes later is below, in a band with a row for
 * each stream that has a node there. An edge between two bands is not a line but a text in the
 * later box, because lines across a long picture cannot be followed.
 *
 * Records and waits become edges. `after` has a row of each stream, then one of each cell: for each
 * stream, 1 + the number of the latest of its nodes that comes directly before, or 0.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "stream/stream.h"

/* Pixels, but OR_BAND and those of texts. */
enum {
  OR_BAND = 8,
  OR_LEFT = 76,
  OR_TOP = 40,
  OR_WIDTH = 168,
  OR_HEIGHT = 40,
  OR_ACROSS = OR_WIDTH + 32,
  OR_DOWN = OR_HEIGHT + 16,
  OR_BETWEEN = 20, /* two bands */
  OR_FITS = 25,    /* characters in a box */
  OR_SQUEEZED = 36 /* ... that still can be read */
};

typedef struct orBox {
  const orGraphNode *node;
  uint32_t column;
  size_t edges; /* the first of those that lead here */
} orBox;

typedef struct orDrawing {
  int device;
  uint32_t lines, count, columns;
  orBox *boxes; /* and one more, with the end of the edges */
  uint32_t *from;
  size_t room;
  uint32_t *rows; /* of the picture, by band and stream, from 1 on; 0: the stream has none there */
  uint32_t row_count;
} orDrawing;

typedef void orWriter(FILE *file, const orDrawing *d);

/* ---- edges ---- */

static bool isShown(const orGraphNode *n) {
  return !n->report && n->task.kind != OR_KIND_RECORD && n->task.kind != OR_KIND_WAIT;
}

static bool addEdge(orDrawing *d, uint32_t from) {
  orBox *to = &d->boxes[d->count];
  size_t used = d->boxes[d->count + 1].edges;
  if (used == d->room) {
    d->room = 2 * d->room + 64;
    uint32_t *larger = realloc(d->from, d->room * sizeof *larger);
    if (!larger) return false;
    d->from = larger;
  }
  d->from[used] = from;
  d->boxes[d->count + 1].edges++;
  if (to->column <= d->boxes[from].column) to->column = d->boxes[from].column + 1;
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
  if (box->column >= d->columns) d->columns = box->column + 1;
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

/* At most `most` characters of it. What is not ASCII is written as its bytes: a name that is no
 * UTF-8 must not break the file. */
static void writeText(FILE *file, const char *text, size_t most, bool xml) {
  size_t length = strlen(text);
  bool cut = length > most;
  for (const char *c = text, *end = text + (cut ? most - 3 : length); c < end; c++) {
    if (*c < ' ' || *c > '~')
      fprintf(file, "%s\\x%02x", xml ? "" : "\\", (unsigned char)*c);
    else if (xml && strchr("&<>\"", *c))
      fprintf(file, "&#%d;", *c);
    else
      fprintf(file, !xml && strchr("\"\\", *c) ? "\\%c" : "%c", *c);
  }
  if (cut) fputs("...", file);
}

typedef struct orDetail {
  char text[48];
} orDetail;

static orDetail detailOf(const orTask *t) {
  orDetail d = {"kernel"};
  switch (t->kind) {
    case OR_KIND_COPY:
      snprintf(d.text, sizeof d.text, "%zu bytes", t->u.copy.bytes);
      break;
    case OR_KIND_SET:
      snprintf(d.text, sizeof d.text, "%zu bytes = %d", t->u.set.bytes, t->u.set.value);
      break;
    case OR_KIND_HOST_FUNC:
      snprintf(d.text, sizeof d.text, "host function");
      break;
    case OR_KIND_KERNEL:
    case OR_KIND_RECORD:
    case OR_KIND_WAIT:
      break;
  }
  return d;
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
    writeText(file, t->name, SIZE_MAX, false);
    fprintf(file, "\\n%s\", fillcolor=\"%s\"];\n", detailOf(t).text, colourOf(t->kind));
  }
  fputs("  }\n", file);
}

static void writeDot(FILE *file, const orDrawing *d) {
  fputs("digraph graph_of_openreg {\n  rankdir=LR;\n", file);
  fputs("  node [shape=box, style=filled, fontname=\"monospace\", fontsize=10];\n", file);
  for (uint32_t line = 0; line < d->lines; line++) writeDotStream(file, d, line);
  for (uint32_t i = 0; i < d->count; i++)
    for (size_t e = d->boxes[i].edges; e < d->boxes[i + 1].edges; e++)
      fprintf(file, "  n%" PRIu32 " -> n%" PRIu32 ";\n", d->from[e], i);
  fputs("}\n", file);
}

/* ---- SVG ---- */

static uint32_t bandOf(const orBox *box) { return box->column / OR_BAND; }

static uint32_t *rowIn(const orDrawing *d, uint32_t band, uint32_t line) {
  return &d->rows[(size_t)band * d->lines + line];
}

static uint32_t bandCount(const orDrawing *d) { return (d->columns + OR_BAND - 1) / OR_BAND; }

static void numberRows(orDrawing *d) {
  for (uint32_t i = 0; i < d->count; i++)
    *rowIn(d, bandOf(&d->boxes[i]), d->boxes[i].node->branch) = 1;
  for (size_t i = 0; i < (size_t)bandCount(d) * d->lines; i++)
    if (d->rows[i]) d->rows[i] = ++d->row_count;
}

static uint32_t topOfRow(uint32_t band, uint32_t row) {
  return OR_TOP + (row - 1) * OR_DOWN + band * OR_BETWEEN;
}

static uint32_t topOf(const orDrawing *d, const orBox *box) {
  return topOfRow(bandOf(box), *rowIn(d, bandOf(box), box->node->branch));
}

static uint32_t leftOf(const orBox *box) { return OR_LEFT + box->column % OR_BAND * OR_ACROSS; }

static void writeRows(FILE *file, const orDrawing *d) {
  for (uint32_t band = 0; band < bandCount(d); band++)
    for (uint32_t line = 0; line < d->lines; line++) {
      uint32_t row = *rowIn(d, band, line);
      if (row)
        fprintf(file, "<text x=\"8\" y=\"%" PRIu32 "\">stream %" PRIu32 "</text>\n",
                topOfRow(band, row) + OR_HEIGHT / 2 + 3, line);
    }
}

static void writeEdges(FILE *file, const orDrawing *d, const orBox *to) {
  uint32_t x = leftOf(to), y = topOf(d, to) + OR_HEIGHT / 2;
  for (size_t e = to->edges; e < to[1].edges; e++) {
    const orBox *from = &d->boxes[d->from[e]];
    bool same_line = from->node->branch == to->node->branch;
    uint32_t x0 = leftOf(from) + OR_WIDTH, y0 = topOf(d, from) + OR_HEIGHT / 2;
    if (bandOf(from) == bandOf(to))
      fprintf(file,
              "<path class=\"%s\" d=\"M%" PRIu32 " %" PRIu32 "C%" PRIu32 " %" PRIu32 " %" PRIu32
              " %" PRIu32 " %" PRIu32 " %" PRIu32 "\"/>\n",
              same_line ? "order" : "event", x0, y0, x0 + 30, y0, x - 30, y, x, y);
    else if (same_line) /* out of the right margin, in from the left one */
      fprintf(file, "<path class=\"order\" d=\"M%d %" PRIu32 "H%" PRIu32 "\"/>\n", OR_LEFT - 14, y,
              x);
  }
}

/* Squeezed to the box, where it is wider. */
static void writeLine(FILE *file, uint32_t x, uint32_t y, const char *text) {
  fprintf(file, "<text x=\"%" PRIu32 "\" y=\"%" PRIu32 "\"", x + 5, y);
  if (strlen(text) > OR_FITS)
    fprintf(file, " textLength=\"%d\" lengthAdjust=\"spacingAndGlyphs\"", OR_WIDTH - 10);
  fputc('>', file);
  writeText(file, text, OR_SQUEEZED, true);
  fputs("</text>\n", file);
}

/* The nodes of other streams that it comes after, and that have no line to it. */
static void writeFar(FILE *file, const orDrawing *d, const orBox *to, uint32_t x, uint32_t y) {
  char text[OR_FITS + 32] = "after";
  size_t length = strlen(text), shown = length;
  for (size_t e = to->edges; e < to[1].edges && length <= OR_FITS; e++) {
    const orBox *from = &d->boxes[d->from[e]];
    if (from->node->branch == to->node->branch || bandOf(from) == bandOf(to)) continue;
    length += (size_t)snprintf(text + length, sizeof text - length, " %" PRIu32, d->from[e]);
  }
  if (length > shown) writeLine(file, x, y, text);
}

static void writeBox(FILE *file, const orDrawing *d, uint32_t i) {
  const orBox *box = &d->boxes[i];
  const orTask *t = &box->node->task;
  uint32_t x = leftOf(box), y = topOf(d, box);
  fprintf(file, "<g><title>%" PRIu32 " ", i);
  writeText(file, t->name, SIZE_MAX, true);
  fprintf(file,
          ", %s</title><rect x=\"%" PRIu32 "\" y=\"%" PRIu32
          "\" width=\"%d\" height=\"%d\" rx=\"3\" fill=\"%s\"/>\n",
          detailOf(t).text, x, y, OR_WIDTH, OR_HEIGHT, colourOf(t->kind));
  writeLine(file, x, y + 13, t->name);
  orDetail detail = detailOf(t);
  writeLine(file, x, y + 25, detail.text);
  writeFar(file, d, box, x, y + 36);
  fprintf(file,
          "<text x=\"%" PRIu32 "\" y=\"%" PRIu32 "\" text-anchor=\"end\">%" PRIu32 "</text></g>\n",
          x + OR_WIDTH - 5, y + 36, i);
}

static void writeSvg(FILE *file, const orDrawing *d) {
  uint32_t columns = d->columns < OR_BAND ? d->columns : OR_BAND;
  uint32_t width = OR_LEFT + (columns < 3 ? 3 : columns) * OR_ACROSS;
  uint32_t height = topOfRow(bandCount(d), d->row_count + 1);
  fprintf(file,
          "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%" PRIu32 "\" height=\"%" PRIu32
          "\" viewBox=\"0 0 %" PRIu32 " %" PRIu32
          "\" font-family=\"monospace\" font-size=\"10\">\n",
          width, height, width, height);
  fputs(
      "<style>path{fill:none;stroke:#555;marker-end:url(#end)}path.event{stroke:#c40}"
      "rect{stroke:#888}</style>\n"
      "<defs><marker id=\"end\" markerWidth=\"7\" markerHeight=\"6\" refX=\"7\" refY=\"3\" "
      "orient=\"auto\"><polygon points=\"0,0 7,3 0,6\" fill=\"#555\"/></marker></defs>\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n",
      file);
  fprintf(file,
          "<text x=\"8\" y=\"20\" font-size=\"12\">graph of device %d: nodes %" PRIu32
          ", streams %" PRIu32 ", of which 0 is the one it is launched on</text>\n",
          d->device, d->count, d->lines);
  writeRows(file, d);
  for (uint32_t i = 0; i < d->count; i++) writeEdges(file, d, &d->boxes[i]);
  for (uint32_t i = 0; i < d->count; i++) writeBox(file, d, i);
  fputs("</svg>\n", file);
}

/* ---- files ---- */

static orError_t writeFile(const char *path, const orDrawing *d, orWriter *write) {
  FILE *file = fopen(path, "we");
  bool written = file;
  if (file) {
    write(file, d);
    written = !ferror(file);
    written &= !fclose(file);
  }
  return written ? orSuccess
                 : orFail(orErrorSystem, "cannot write \"%s\": %s", path, strerror(errno));
}

/* The path with another suffix; or null. To be freed. */
static char *besides(const char *path) {
  const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
  const char *dot = strrchr(name, '.');
  size_t stem = dot && dot > name ? (size_t)(dot - path) : strlen(path);
  char *svg = malloc(stem + sizeof ".svg");
  if (svg) {
    memcpy(svg, path, stem);
    memcpy(svg + stem, ".svg", sizeof ".svg");
  }
  return svg;
}

static orError_t writeBoth(const char *path, const orDrawing *d) {
  char *svg = besides(path);
  if (!svg) return orFail(orErrorMemoryAllocation, "no memory for a path");
  orError_t error = !strcmp(svg, path)
                        ? orFail(orErrorInvalidValue,
                                 "\"%s\" is where the picture would be: name the DOT file", path)
                        : writeFile(path, d, writeDot);
  if (!error) error = writeFile(svg, d, writeSvg);
  free(svg);
  return error;
}

orError_t orGraphDraw(int device, const orGraphNodes *nodes, uint32_t lines, uint32_t cells,
                      const char *path) {
  orDrawing d = {.device = device, .lines = lines};
  bool made = addAll(&d, nodes, cells);
  if (made) made = (d.rows = calloc((size_t)bandCount(&d) * lines + 1, sizeof *d.rows)) != NULL;
  orError_t error = orErrorMemoryAllocation;
  if (made) {
    numberRows(&d);
    error = writeBoth(path, &d);
  } else
    orFail(error, "no memory to draw a graph");
  free(d.boxes);
  free(d.from);
  free(d.rows);
  return error;
}
