// Boxes and arrows laid out by dagre, in layers from top to bottom.

/** Places for boxes of known size: {boxes: Map id → {x, y}, arrows: [{from, to, points}], left, width, height}. */
function layOut(boxes, arrows) {
  const g = new dagre.graphlib.Graph({ multigraph: true });
  g.setGraph({ rankdir: "TB", nodesep: 18, ranksep: 30, edgesep: 10, marginx: 16, marginy: 16 });
  g.setDefaultEdgeLabel(() => ({}));
  for (const box of boxes) g.setNode(String(box.id), { width: box.width, height: box.height });
  arrows.forEach((a, i) => g.setEdge(String(a.from), String(a.to), { weight: a.weight ?? 1 }, String(i)));
  dagre.layout(g);
  const placed = new Map(boxes.map((box) => [box.id, g.node(String(box.id))]));
  const lines = arrows.map((a, i) => ({ ...a, points: g.edge(String(a.from), String(a.to), String(i)).points }));
  const { width, height } = g.graph();
  const xs = lines.flatMap((a) => a.points.map((p) => p.x)); // arrows may lead outside of what the boxes need
  const [left, right] = [Math.min(0, ...xs.map((x) => x - 8)), Math.max(width, 1, ...xs.map((x) => x + 8))];
  return { boxes: placed, arrows: lines, left, width: right - left, height: Math.max(height, 1) };
}
