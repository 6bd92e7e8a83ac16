// Bodies of messages: what they are, decoded, and shown: JSON with folding, MessagePack, text, hex.
import { html, useMemo, useState } from "./lib.js";
import { Copy } from "./ui.js";

export function fromBase64(text) {
  const raw = atob(text || "");
  const found = new Uint8Array(raw.length);
  for (let index = 0; index < raw.length; index += 1) found[index] = raw.charCodeAt(index);
  return found;
}

/** Integers that a number cannot hold stay exact where the browser tells their digits. */
function parseJson(text) {
  return JSON.parse(text, (_, value, about) => (typeof value === "number" && about?.source && /^-?\d+$/.test(about.source) && !Number.isSafeInteger(value) ? BigInt(about.source) : value));
}

/** Decode one MessagePack value that fills all of `data`; throws otherwise. */
export function unpack(data) {
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  const words = new TextDecoder("utf-8", { fatal: true });
  let at = 0;
  let nested = 0;
  const skip = (size) => { if (at + size > data.length) throw new RangeError("too short"); at += size; return at - size; };
  const uint = (size) => (size === 1 ? view.getUint8(skip(1)) : size === 2 ? view.getUint16(skip(2)) : view.getUint32(skip(4)));
  const small = (value) => (value >= -9007199254740991n && value <= 9007199254740991n ? Number(value) : value);
  const text = (size) => { const from = skip(size); return words.decode(data.subarray(from, from + size)); };
  const binary = (size) => { const from = skip(size); return data.subarray(from, from + size); };
  const list = (size) => Array.from({ length: Math.min(size, data.length) }, next);
  const map = (size) => {
    const found = [];
    for (let index = 0; index < size; index += 1) { const key = next(); found.push([typeof key === "string" ? key : show(key), next()]); }
    return Object.fromEntries(found);
  };
  const extension = (size) => {
    const kind = view.getInt8(skip(1));
    const bytes = binary(size);
    if (kind === -1) {
      const inner = new DataView(bytes.buffer, bytes.byteOffset, size);
      if (size === 4) return new Date(inner.getUint32(0) * 1000);
      if (size === 8) { const both = inner.getBigUint64(0); return new Date(Number(both & 0x3ffffffffn) * 1000 + Number(both >> 34n) / 1e6); }
      if (size === 12) return new Date(Number(inner.getBigInt64(4)) * 1000 + inner.getUint32(0) / 1e6);
    }
    return { extension: kind, bytes };
  };
  function next() {
    if ((nested += 1) > 200000) throw new RangeError("too much");
    const head = uint(1);
    if (head < 0x80) return head;
    if (head < 0x90) return map(head & 15);
    if (head < 0xa0) return list(head & 15);
    if (head < 0xc0) return text(head & 31);
    if (head >= 0xe0) return head - 256;
    switch (head) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: case 0xc5: case 0xc6: return binary(uint(1 << (head - 0xc4)));
      case 0xc7: case 0xc8: case 0xc9: return extension(uint(1 << (head - 0xc7)));
      case 0xca: return view.getFloat32(skip(4));
      case 0xcb: return view.getFloat64(skip(8));
      case 0xcc: case 0xcd: case 0xce: return uint(1 << (head - 0xcc));
      case 0xcf: return small(view.getBigUint64(skip(8)));
      case 0xd0: return view.getInt8(skip(1));
      case 0xd1: return view.getInt16(skip(2));
      case 0xd2: return view.getInt32(skip(4));
      case 0xd3: return small(view.getBigInt64(skip(8)));
      case 0xd4: case 0xd5: case 0xd6: case 0xd7: case 0xd8: return extension(1 << (head - 0xd4));
      case 0xd9: case 0xda: case 0xdb: return text(uint(1 << (head - 0xd9)));
      case 0xdc: case 0xdd: return list(uint(head === 0xdc ? 2 : 4));
      case 0xde: case 0xdf: return map(uint(head === 0xde ? 2 : 4));
      default: throw new RangeError("no MessagePack");
    }
  }
  const value = next();
  if (at !== data.length) throw new RangeError("bytes are left");
  return value;
}

/** What a body is: { kind: json | msgpack | text | hex, value, text }. */
export function decode(data) {
  let text = null;
  try { text = new TextDecoder("utf-8", { fatal: true }).decode(data); } catch { /* binary */ }
  // eslint-disable-next-line no-control-regex
  const isText = text !== null && !/[\u0000-\u0008\u000e-\u001f]/.test(text);
  if (isText) {
    try { const value = parseJson(text); if (/^\s*[[{"]/.test(text)) return { kind: "json", value, text }; } catch { /* plain text */ }
  }
  if (data.length && !isText) {
    try { const value = unpack(data); if (value && typeof value === "object") return { kind: "msgpack", value, text: null }; } catch { /* something else */ }
  }
  return isText ? { kind: "text", text } : { kind: "hex", text: null };
}

const digits = (number, width = 2) => number.toString(16).padStart(width, "0");
export const hexOf = (data, most = 32) => `${Array.from(data.subarray(0, most), (one) => digits(one)).join(" ")}${data.length > most ? " …" : ""}`;

/** The first line of a body, for a list. */
export function firstLine(data) {
  const found = decode(data);
  if (found.kind === "msgpack") return show(found.value);
  if (found.kind === "hex") {
    const start = new TextDecoder().decode(data.subarray(0, 200));
    return /[\ufffd\u0000-\u0008\u000e-\u001f]/.test(start.slice(0, -2)) ? hexOf(data) : start;
  }
  return found.text.slice(0, 300).replace(/\s+/g, " ").trim();
}

function dump(data, most = 4096) {
  const lines = [];
  for (let at = 0; at < Math.min(data.length, most); at += 16) {
    const row = data.subarray(at, at + 16);
    const shown = Array.from(row, (one) => digits(one)).join(" ").padEnd(48);
    lines.push(`${digits(at, 6)}  ${shown} ${Array.from(row, (one) => (one > 31 && one < 127 ? String.fromCharCode(one) : ".")).join("")}`);
  }
  if (data.length > most) lines.push(`… ${data.length - most} bytes more`);
  return lines.join("\n");
}

/** A value on one line. */
function show(value) {
  return JSON.stringify(value, (_, one) => (typeof one === "bigint" ? `${one}` : one instanceof Uint8Array ? `0x${hexOf(one, 16)}` : one)) ?? String(value);
}

const MOST_CHILDREN = 100;

function Tree({ name, value, level = 0 }) {
  const [all, setAll] = useState(false);
  const [open, setOpen] = useState(level < 3);
  const key = name === undefined ? null : html`<span class="k">${typeof name === "number" ? name : JSON.stringify(name)}</span>: `;
  const isBranch = value !== null && typeof value === "object" && !(value instanceof Uint8Array) && !(value instanceof Date);
  if (!isBranch) {
    const kind = typeof value === "string" ? "s" : typeof value === "number" || typeof value === "bigint" ? "n" : "z";
    const shown = value instanceof Uint8Array ? `${value.length} bytes: ${hexOf(value)}` : value instanceof Date ? value.toISOString() : typeof value === "string" ? JSON.stringify(value) : String(value);
    return html`<div class="leaf">${key}<span class=${kind}>${shown}</span></div>`;
  }
  const list = Array.isArray(value);
  const entries = list ? value.map((one, index) => [index, one]) : Object.entries(value);
  if (!entries.length) return html`<div class="leaf">${key}<span class="z">${list ? "[]" : "{}"}</span></div>`;
  const shown = all ? entries : entries.slice(0, MOST_CHILDREN);
  return html`<details open=${open} onToggle=${(event) => { if (event.target === event.currentTarget) setOpen(event.currentTarget.open); }}><summary>${key}<span class="z">${list ? `[ ${entries.length} ]` : `{ ${entries.length} }`}</span></summary>
    ${open ? html`${shown.map(([child, one]) => html`<${Tree} key=${child} name=${child} value=${one} level=${level + 1} />`)}
      ${shown.length < entries.length ? html`<button class="small" onClick=${() => setAll(true)}>${entries.length - shown.length} more</button>` : null}` : null}</details>`;
}

const KINDS = { json: "JSON", msgpack: "MessagePack", text: "text", hex: "hex" };

export function Body({ data, truncated }) {
  const found = useMemo(() => decode(data), [data]);
  const [chosen, setChosen] = useState(null);
  const offered = [["json", "msgpack"].includes(found.kind) && found.kind, found.text !== null && "text", "hex"].filter(Boolean);
  const kind = offered.includes(chosen) ? chosen : found.kind;
  const copied = found.kind === "msgpack" && kind !== "hex" ? show(found.value) : kind === "hex" ? hexOf(data, Infinity) : found.text;
  return html`<div class="row body-head"><div class="ranges" role="group" aria-label="Shown as">${offered.map((one) => html`<button key=${one} class="small" aria-pressed=${one === kind} onClick=${() => setChosen(one)}>${KINDS[one]}</button>`)}</div>
      <span class="grow"></span><${Copy} text=${copied} /></div>
    <div class=${`body mono ${kind}`} tabindex="0" role="region" aria-label="Body">${kind === "json" || kind === "msgpack" ? html`<${Tree} value=${found.value} />` : kind === "text" ? found.text || html`<span class="z">empty</span>` : dump(data)}</div>
    ${truncated ? html`<p class="quiet">Only its beginning is shown.</p>` : null}`;
}
