// Heat maps: draw a distribution at each step, its shares as shades, inside a uPlot chart.
//
// heat is {x: steps, edges: upper ends of the ranges but the last, counts: one list for each x}.

// Return the table that gives the chart its x values.
export function heatTable(heat) {
  return [heat.x, heat.x.map(() => 0)];
}

export const heatHooks = {
  // The vertical axis names the ranges.
  axis(heat, font, colour) {
    const isCounted = heat.edges.every((edge, place) => edge === place);
    const names = heat.edges.map((edge) => (isCounted ? String(edge) : `to ${edge}`));
    names.push(isCounted ? String(heat.edges.length) : `above ${heat.edges.at(-1)}`);
    return {
      scale: "y",
      font,
      stroke: () => colour("soft"),
      grid: { show: false },
      ticks: { show: false },
      splits: () => names.map((_, place) => place + 0.5),
      values: () => names,
      filter: (_, splits) => splits,
      size: 12 + 6.6 * Math.max(...names.map((name) => name.length)),
    };
  },

  series() {
    return { paths: () => null, points: { show: false } };
  },

  draw(plot, heat, shade, xs) {
    const { ctx, bbox } = plot;
    const at = (value) => plot.valToPos(value, "x", true);
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.fillStyle = shade;
    const rows = heat.edges.length + 1,
      height = bbox.height / rows;
    xs.forEach((x, place) => {
      const before = place > 0 ? xs[place - 1] : x - ((xs[1] ?? x + 1) - x);
      const after = place + 1 < xs.length ? xs[place + 1] : x + (x - before);
      const start = at((before + x) / 2),
        end = at((x + after) / 2);
      const total = heat.counts[place].reduce((sum, count) => sum + count, 0);
      heat.counts[place].forEach((count, row) => {
        if (count === 0) return;
        ctx.globalAlpha = Math.max(0.05, count / total);
        ctx.fillRect(start, bbox.top + bbox.height - (row + 1) * height, end - start + 0.5, height);
      });
    });
    ctx.restore();
  },
};
