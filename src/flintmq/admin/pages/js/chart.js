// Lines and areas over time, as SVG: colours come from the style sheet, and one crosshair moves on all charts of a page.
import { html, useEffect, useMemo, useRef, useState, useStore, bytes, count, store, time } from "./lib.js";

const LEFT = 64;
const TOP = 8;
const BOTTOM = 24;
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
// Seconds since 1970 under the pointer, in whichever chart it is; null: in none.
const pointed = store(null);

export function lastOf(values) {
  return values?.findLast((value) => value !== null) ?? null;
}

/** Whole steps between two times, as the clock on the wall has them. */
function times(from, to, most) {
  const step = STEPS.find((one) => (to - from) / one <= most) || STEPS.at(-1);
  const zone = new Date(from * 1000).getTimezoneOffset() * 60;
  const found = [];
  for (let at = Math.ceil((from - zone) / step) * step + zone; at <= to; at += step) found.push(at);
  return found;
}

/** Round numbers from low to high: whole ones of messages, powers of two of bytes. */
function numbers(low, high, most, format) {
  const size = 10 ** Math.floor(Math.log10((high - low) / most));
  let step = size * [1, 2, 5, 10].find((one) => (high - low) / (size * one) <= most);
  if (format === bytes) step = 2 ** Math.ceil(Math.log2((high - low) / most));
  if (format === bytes || format === count) step = Math.max(1, step);
  const found = [];
  for (let number = Math.ceil(low / step); number * step <= high; number += 1) found.push(number * step);
  return found;
}

/** A line of the known values, with a gap where one is not known; closed at `floor` for an area. */
function outline(xs, values, x, y, floor) {
  let path = "";
  let from = null;
  const close = (index) => { if (from !== null && floor !== undefined) path += `V${floor}H${x(xs[from])}`; from = index; };
  xs.forEach((at, index) => {
    const value = values[index] ?? null;
    if (value === null) { close(null); return; }
    const pen = from === null ? "M" : "L";
    if (from === null) from = index;
    path += `${pen}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
  });
  close(null);
  return path;
}

/** series: [{ key, title, colour, area, format }]; data: { x: [seconds], [key]: [values] } */
export function Chart({ title, series, data, height = 180, format = count }) {
  const box = useRef(null);
  const [width, setWidth] = useState(0);
  const at = useStore(pointed);
  useEffect(() => {
    const watch = new ResizeObserver(() => setWidth(box.current?.clientWidth || 0));
    watch.observe(box.current);
    return () => { watch.disconnect(); pointed.set(null); };
  }, []);
  const xs = data.x;
  const [from, to] = [xs[0] ?? 0, xs.at(-1) ?? 0];
  const floor = height - BOTTOM;
  const x = (second) => LEFT + ((second - from) / (to - from || 1)) * (width - LEFT - 8);
  const drawn = useMemo(() => {
    if (!width || !xs.length) return null;
    let [low, high] = [0, 0];
    for (const { key } of series) for (const value of data[key] || []) { low = Math.min(low, value); high = Math.max(high, value); }
    high = high > 0 ? high * 1.1 : 1;
    const y = (value) => floor - ((value - low) / (high - low)) * (floor - TOP);
    return html`<g class="grid">${numbers(low, high, Math.max(2, height / 40), format).map((value) => html`<path key=${value} d=${`M${LEFT} ${y(value)}H${width}`} /><text key=${`t${value}`} x=${LEFT - 8} y=${y(value) + 4} text-anchor="end">${format(value)}</text>`)}
      ${times(from, to, (width - LEFT) / 80).map((second) => html`<path key=${second} d=${`M${x(second)} ${TOP}V${floor}`} /><text key=${`t${second}`} x=${x(second)} y=${height - 6} text-anchor="middle">${time(second * 1000, false)}</text>`)}</g>
      ${series.map(({ key, area, colour }) => html`<g key=${key} style=${{ color: `var(--${colour})` }}>${area ? html`<path class="area" d=${outline(xs, data[key] || [], x, y, y(0))} />` : null}<path class="line" d=${outline(xs, data[key] || [], x, y)} /></g>`)}`;
  }, [data, width, height, format]);
  const move = (event) => {
    const share = (event.clientX - box.current.getBoundingClientRect().left - LEFT) / (width - LEFT - 8);
    pointed.set(share < 0 || share > 1 ? null : from + share * (to - from));
  };
  // The sample next to the pointer.
  const after = at === null || at < from || at > to ? -1 : xs.findIndex((second) => second >= at);
  const index = after > 0 && at - xs[after - 1] < xs[after] - at ? after - 1 : after;
  const shown = (one, value) => (one.format || format)(value);
  const last = series.map((one) => `${one.title} ${shown(one, lastOf(data[one.key]))}`).join(", ");
  return html`<figure class="chart"><figcaption>${title}</figcaption><div ref=${box} role="img" aria-label=${`${title}: now ${last}`} style=${{ height: `${height}px` }} onPointerMove=${move} onPointerLeave=${() => pointed.set(null)}>
    <svg width=${width} height=${height}>${drawn}${index < 0 ? null : html`<path class="cross" d=${`M${x(xs[index])} ${TOP}V${floor}`} />`}</svg></div>
    <div class="series">${series.map((one) => html`<span key=${one.key}><i style=${{ background: `var(--${one.colour})` }}></i>${one.title} <b>${shown(one, index < 0 ? lastOf(data[one.key]) : data[one.key]?.[index] ?? null)}</b></span>`)}${index < 0 ? null : html`<span class="quiet">${time(xs[index] * 1000)}</span>`}</div></figure>`;
}
