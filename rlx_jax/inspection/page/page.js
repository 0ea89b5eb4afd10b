"use strict";
// The page of one or more inspections (rlx_jax/inspection/records.py). Names come from files that may be hostile, so
// text enters the document as text nodes only, never as HTML.
const { inspections, texts } = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

// Return a new element. Attributes that are functions are event listeners.
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    typeof value === "function" ? element.addEventListener(name, value) : element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// -- numbers ------------------------------------------------------------------------------------

function scaled(value, units, step = 1000) {
  let unit = 0;
  for (; Math.abs(value) >= step && unit < units.length - 1; unit++) value /= step;
  const digits = Math.abs(value) >= 100 || !unit && Number.isInteger(value) ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[unit]}`.trim();
}
const time = (seconds) => seconds === null ? "–" : scaled(seconds * 1e9, ["ns", "µs", "ms", "s"]);
const bytes = (number) => number === null ? "–" : scaled(number, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);
const count = (number, unit = "") => scaled(number, ["", "K", "M", "G", "T", "P"]) + unit;
const signed = (seconds) => `${seconds < 0 ? "−" : "+"}${time(Math.abs(seconds))}`;
const ratio = (part, total) => total ? part / total : 0;
const percent = (part, total) => `${(100 * ratio(part, total)).toFixed(ratio(part, total) < 0.0995 ? 1 : 0)} %`;

// -- the tree of blocks -------------------------------------------------------------------------

const SUMS = ["seconds", "roofline_seconds", "flops", "bytes", "params", "param_bytes"];
const inside = (path, parent) => path === parent || path.startsWith(`${parent}.`);
const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;
const searchText = (...fields) => fields.join(" ").toLowerCase();

// Return an inspection with its blocks as a list of nodes in the order of the tree, and flat lists of ops and kernels.
// Repeated layers are one block already, `layers.*`. A node has the sums over its block and the blocks inside.
function readInspection(inspection) {
  const root = { path: "", block: {}, children: [] };
  const nodes = new Map([["", root]]);
  const nodeAt = (path) => {
    if (!nodes.has(path)) {
      const parent = nodeAt(path.startsWith("(") ? "" : path.slice(0, Math.max(path.lastIndexOf("."), 0)));
      nodes.set(path, { path, block: {}, children: [] });
      parent.children.push(nodes.get(path));
    }
    return nodes.get(path);
  };
  for (const block of inspection.blocks) nodeAt(block.path).block = block;
  const ordered = [];
  const finish = (node, parent, depth) => {
    while (parent && !node.block.path && node.children.length === 1) [node] = node.children;
    if (parent) ordered.push(node);
    const name = parent?.path ? node.path.slice(parent.path.length + 1) : node.path;
    const children = node.children.map((child) => finish(child, node, depth + 1));
    const layers = node.block.layers ?? Math.min(...children.map((child) => child.layers));
    const parts = [node.block, ...children];
    const strips = parts.map((part) => part.layer_seconds ?? []).filter((strip) => strip.length);
    const [first = []] = strips.every((strip) => strip.length === strips[0].length) ? strips : [];
    const slowest = parts.reduce((most, part) => (part.seconds ?? 0) > (most.seconds ?? 0) ? part : most);
    for (const key of SUMS) node[key] = parts.reduce((sum, part) => sum + (part[key] ?? 0), 0);
    return Object.assign(node, {
      id: node.path, parent, depth, children, layers, limit: slowest.limit ?? slowest.limited_by ?? "",
      label: layers > 1 && name.endsWith("*") ? `${name} × ${layers}` : name,
      layer_seconds: first.map((_, layer) => strips.reduce((sum, strip) => sum + strip[layer], 0)),
      search: searchText(node.path, node.block.op, node.block.scheme, node.block.implementation),
    });
  };
  finish(root, null, -1);
  const items = (kind) => inspection.blocks.flatMap((block) => block[kind].filter((item) => item.name).map(
    (item, index) => ({
      ...item, path: block.path, id: `${block.path}:${index}`,
      search: searchText(block.path, item.name, item.text, item.result, item.primitive, item.opcode),
    })));
  const kernel = items("kernels").sort((a, b) => b.seconds - a.seconds);
  return { ...inspection, root, block: ordered, op: items("ops"), kernel };
}

// -- state: what is shown and selected, kept in the fragment of the address ----------------------

const KINDS = { block: "Blocks", op: "Ops", kernel: "Kernels" };
const DEFAULTS = { shown: "0", base: "", block: "", op: "", kernel: "", layer: "", search: "" };
const state = { ...DEFAULTS };
const closed = new Set();
let model, base;

const selectedKind = () => Object.keys(KINDS).find((kind) => state[kind]) ?? "block";
const selection = () => model[selectedKind()].find((item) => item.id === state[selectedKind()]);

function readAddress() {
  Object.assign(state, DEFAULTS, Object.fromEntries(new URLSearchParams(location.hash.slice(1))));
  showAll();
}

function writeAddress() {
  const fields = Object.entries(state).filter(([name, value]) => name in DEFAULTS && value !== DEFAULTS[name]);
  try {
    history.replaceState(null, "", `#${new URLSearchParams(fields)}`);
  } catch { /* the frame of a notebook has no address of its own */ }
}

function select(kind, id, layer = "") {
  Object.assign(state, { block: "", op: "", kernel: "", layer: String(layer), [kind]: id });
  refresh();
}

// -- three columns: blocks, ops and kernels -------------------------------------------------------

const columns = {};

function makeColumns() {
  for (const [kind, title] of Object.entries(KINDS)) {
    const list = make("div", {
      class: "list", role: "listbox", tabindex: 0, "aria-label": title, keydown: (event) => onKey(event, kind),
    });
    const figure = make("span", {});
    const panel = make("div", { class: "column" }, make("h2", {}, title, figure), list);
    const tab = make("button", { click: () => showColumn(kind) });
    columns[kind] = { list, figure, panel, tab, rows: [] };
    byId("columns").append(panel);
    byId("tabs").append(tab);
  }
}

// Focus a column; where the window has space for one only, the others are hidden.
function showColumn(kind, focus = true) {
  for (const [name, { panel, tab }] of Object.entries(columns)) {
    panel.classList.toggle("current", name === kind);
    tab.setAttribute("aria-pressed", name === kind);
  }
  if (focus) columns[kind].list.focus();
}

const limitClass = (limit) => ["memory", "compute"].includes(limit) ? limit : "idle";

const CELLS = {
  block(node) {
    const other = base?.block.find(({ path }) => path === node.path);
    const mark = make("i", { class: "open", click: (event) => { event.stopPropagation(); toggle(node); } });
    const name = make("span", { title: node.path }, mark, node.label);
    name.style.paddingLeft = `${14 * node.depth}px`;
    const fill = make("i", { class: limitClass(node.limit) });
    fill.style.width = percent(node.seconds, model.seconds).replace(" ", "");
    const figures = make("span", { class: "num" }, `${time(node.seconds)} · ${percent(node.seconds, model.seconds)}`);
    if (other) figures.append(changeText(node.seconds - other.seconds));
    return [name, figures, make("div", { class: "track" }, fill)];
  },
  op: (op) => [
    make("span", { title: op.text }, `${op.name} ${op.text}`),
    make("span", { class: "num" }, op.flops ? count(op.flops, "FLOP") : bytes(op.bytes)),
    make("small", {}, `${op.result} · ${op.path}`),
  ],
  kernel: (kernel) => [
    make("span", { title: kernel.name }, kernel.name), make("span", { class: "num" }, time(kernel.seconds)),
    make("small", {}, [kernel.primitive || kernel.opcode, kernel.calls > 1 && `× ${kernel.calls}`, kernel.path]
      .filter(Boolean).join(" · ")),
  ],
};

const changeText = (seconds) => make("b", { class: seconds > 0 ? "worse" : "better" }, ` ${signed(seconds)}`);

function fillColumns() {
  for (const [kind, column] of Object.entries(columns)) {
    column.rows = model[kind].map((item) => ({ item, element: make("div", {
      class: `row ${kind}`, role: "option", id: `${kind} ${item.id}`,
      click: () => { select(kind, item.id); column.list.focus(); },
    }, ...CELLS[kind](item)) }));
    column.list.replaceChildren(...column.rows.map(({ element }) => element));
    if (!column.rows.length) column.list.append(make("p", { class: "hint" }, "None: compile or run the program."));
  }
}

function isClosed(node) {
  for (let parent = node.parent; parent; parent = parent.parent) if (closed.has(parent.path)) return true;
  return false;
}

function toggle(node) {
  closed[closed.has(node.path) ? "delete" : "add"](node.path);
  if (selection() && selection().path !== node.path && inside(selection().path, node.path)) select("block", node.path);
  refresh();
}

// Mark the selected row and those that belong to it, and hide rows that the search or a closed block leaves out.
function refresh() {
  const selected = selection();
  const query = state.search.toLowerCase();
  for (const [kind, { rows, list, figure, tab }] of Object.entries(columns)) {
    const related = [];
    let picked;
    for (const { item, element } of rows) {
      element.hidden = query ? !item.search.includes(query) : kind === "block" && isClosed(item);
      const isPicked = state[kind] === item.id;
      const isRelated = Boolean(selected) && inside(item.path, selected.path);
      if (isPicked) picked = element;
      if (isRelated && !element.hidden) related.push(element);
      element.classList.toggle("picked", isPicked);
      element.classList.toggle("related", isRelated && !isPicked);
      element.setAttribute("aria-selected", isPicked);
      if (item.children?.length) element.querySelector(".open").textContent = closed.has(item.id) ? "▸" : "▾";
    }
    const total = visibleItems(kind).length;
    figure.textContent = selected ? `${related.length} of ${total}` : total;
    tab.textContent = `${KINDS[kind]} ${figure.textContent}`;
    list.setAttribute("aria-activedescendant", picked?.id ?? "");
    const target = picked ?? related[0];
    const top = target ? target.offsetTop - list.scrollTop : 0;
    if (top < 0 || top > list.clientHeight - 40) list.scrollTop += top - list.clientHeight / 4;
  }
  showSelected(selected);
  drawTime(selected);
  writeAddress();
}

const visibleItems = (kind) =>
  columns[kind].rows.filter(({ element }) => !element.hidden).map(({ item }) => item);

function onKey(event, kind) {
  const items = visibleItems(kind);
  const at = items.findIndex((item) => item.id === state[kind]);
  const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 9, PageUp: -9, Home: -1e9, End: 1e9 }[event.key];
  const side = Object.keys(KINDS)[Object.keys(KINDS).indexOf(kind) + { ArrowRight: 1, ArrowLeft: -1 }[event.key]];
  if (step && items.length) select(kind, items[Math.min(items.length - 1, Math.max(0, at < 0 ? 0 : at + step))].id);
  else if (side) enterColumn(side);
  else if (event.key === "Enter" && items[at]?.children?.length) toggle(items[at]);
  else return;
  event.preventDefault();
}

// Focus a column, and select its first row that belongs to what is selected, or its first row.
function enterColumn(kind) {
  const selected = selection();
  const item = visibleItems(kind).find(({ path }) =>
    !selected || (kind === "block" ? path === selected.path : inside(path, selected.path)));
  showColumn(kind);
  if (item) select(kind, item.id);
}

// -- what is selected ---------------------------------------------------------------------------

function facts(item) {
  const { block } = item;
  if (!block) return {
    Block: item.path, Result: item.result, Inputs: item.inputs?.join(", "), FLOPs: item.flops && count(item.flops),
    Bytes: item.bytes && bytes(item.bytes), "Created by": item.by, Primitive: item.primitive, "HLO opcode": item.opcode,
    Time: item.opcode && time(item.seconds), Calls: item.calls,
  };
  return {
    Time: `${time(item.seconds)}, ${percent(item.seconds, model.seconds)}${model.measured ? "" : ", estimated"}`,
    Roofline: item.roofline_seconds && `${time(item.roofline_seconds)}, limited by ${item.limit}`,
    "Share of the roofline": item.roofline_seconds && percent(item.roofline_seconds, item.seconds),
    FLOPs: count(item.flops), Bytes: bytes(item.bytes), Layers: item.layers > 1 && item.layers,
    Parameters: item.params && `${count(item.params)}, ${bytes(item.param_bytes)} ${block.scheme ?? ""}`,
    Op: block.op, Output: block.output, Sharding: block.sharding, Implementation: block.implementation,
    Reason: block.reason,
  };
}

function showSelected(item) {
  const panel = byId("selected");
  if (!item) return panel.replaceChildren("Select a block, an op or a kernel to see what belongs to it.");
  const pairs = Object.entries(facts(item)).filter(([, value]) => value);
  panel.replaceChildren(make("h3", {}, item.block ? item.path : `${item.name} ${item.text ?? ""}`));
  panel.append(make("dl", {}, ...pairs.map(([name, value]) =>
    make("div", { class: String(value).length > 60 ? "wide" : "" }, make("dt", {}, name), make("dd", {}, value)))));
  if (item.layer_seconds?.length > 1) drawStrip(panel, item);
  const found = [...model.losses, ...model.findings].filter(({ path }) => path && inside(path, item.path));
  panel.append(...found.map(({ path, text, advice }) => make("p", {}, path === item.path ? "" : pathLink(path),
    ` ${path === item.path ? sentence(text) : `${text}.`} `, make("span", { class: "dim" }, sentence(advice)))));
}

// -- drawings -----------------------------------------------------------------------------------

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);

function startDrawing(canvas, height) {
  const scale = window.devicePixelRatio;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(canvas.clientWidth * scale);
  canvas.height = Math.round(height * scale);
  const drawing = canvas.getContext("2d");
  drawing.scale(scale, scale);
  return drawing;
}

// Draw the times of the layers as bars. Pointing at a bar tells its time, a click selects its layer.
function drawStrip(panel, node) {
  const canvas = panel.appendChild(make("canvas", { role: "img", "aria-label": "Time of each layer" }));
  const label = panel.appendChild(make("small", { class: "dim" }));
  const times = node.layer_seconds;
  const [width, longest] = [canvas.clientWidth / times.length, Math.max(...times)];
  const drawing = startDrawing(canvas, 48);
  times.forEach((seconds, layer) => {
    const height = Math.max(1, 48 * ratio(seconds, longest));
    drawing.fillStyle = color(String(layer) === state.layer ? "pick" : limitClass(node.limit));
    drawing.fillRect(layer * width, 48 - height, Math.max(1, width - 1), height);
  });
  const tell = (layer) => {
    label.textContent = layer in times ? `layer ${layer}: ${time(times[layer])}`
      : `${times.length} layers, ${time(Math.min(...times))} to ${time(longest)} each`;
  };
  canvas.addEventListener("pointermove", (event) => tell(Math.floor(event.offsetX / width)));
  canvas.addEventListener("pointerleave", () => tell(state.layer));
  canvas.addEventListener("click", (event) => select("block", node.id, Math.floor(event.offsetX / width)));
  tell(state.layer);
}

const BOX = 24;
let boxes = [];

// Draw the blocks as nested boxes, as wide as their time. The strong line in a box is the part of its time that the
// roofline allows: what it leaves of the width is what a better program could save.
function drawTime(selected) {
  const depth = Math.max(0, ...model.block.map((node) => node.depth + 1));
  const drawing = startDrawing(byId("time"), depth * BOX);
  const scale = ratio(byId("time").clientWidth, model.root.seconds);
  drawing.font = "12px system-ui, sans-serif";
  drawing.strokeStyle = color("pick");
  drawing.lineWidth = 2;
  boxes = [];
  const draw = (node, left) => {
    const [width, top] = [scale * node.seconds, node.depth * BOX];
    if (width < 0.5) return;
    boxes.push({ node, left, top, width });
    drawing.fillStyle = color(limitClass(node.limit));
    drawing.globalAlpha = 0.28;
    drawing.fillRect(left, top, width - 1, BOX - 1);
    drawing.globalAlpha = 1;
    drawing.fillRect(left, top + BOX - 5, (width - 1) * Math.min(1, ratio(node.roofline_seconds, node.seconds)), 4);
    if (selected && inside(node.path, selected.path)) drawing.strokeRect(left + 1, top + 1, width - 3, BOX - 3);
    drawing.fillStyle = color("text");
    if (width > 26) drawing.fillText(fitted(drawing, node.label, width - 8), left + 4, top + 14);
    drawChildren(node, left);
  };
  const drawChildren = (node, left) => {
    for (const child of node.children) {
      draw(child, left);
      left += scale * child.seconds;
    }
  };
  drawChildren(model.root, 0);
}

// Return the text cut to a width in pixels.
function fitted(drawing, text, width) {
  let length = text.length;
  const cut = () => length < text.length ? `${text.slice(0, length)}…` : text;
  while (length > 1 && drawing.measureText(cut()).width > width) length--;
  return length > 1 ? cut() : "";
}

const nodeAtPointer = ({ offsetX: x, offsetY: y }) => boxes.find(({ left, top, width }) =>
  x >= left && x < left + width && y >= top && y < top + BOX)?.node;

function describe(node) {
  const share = node.roofline_seconds
    ? `, ${percent(node.roofline_seconds, node.seconds)} of the roofline, limited by ${node.limit}` : "";
  return `${node.path}: ${time(node.seconds)}, ${percent(node.seconds, model.seconds)} of the run${share}`;
}

// -- summary ------------------------------------------------------------------------------------

function showSummary() {
  const { name, program, sizes, device, seconds, measured, roofline_seconds, losses } = model;
  byId("name").textContent = name;
  byId("where").textContent = [program, ...Object.entries(sizes).map((size) => size.join(" ")), device].join(" · ");
  const tile = (value, ...text) => make("div", { class: "tile" }, make("b", {}, value), make("span", {}, ...text));
  const change = base ? changeText(seconds - base.seconds) : "";
  byId("tiles").replaceChildren(
    tile(time(seconds), measured ? "a run, measured" : "a run, estimated, not measured", change),
    tile(percent(roofline_seconds, seconds), `of the roofline reached, ${time(roofline_seconds)}`),
    tile(bytes(model.bytes), `memory traffic, ${bytes(ratio(model.bytes, seconds))}/s`),
    tile(count(model.flops, "FLOP"), `operations, ${count(ratio(model.flops, seconds), "FLOP/s")}`),
    tile(bytes(model.param_bytes), "parameters"), ...model.cache_bytes ? [tile(bytes(model.cache_bytes), "cache")] : [],
    tile(bytes(model.peak_bytes), "memory at its peak"));
  showBudget();
  byId("losses").parentElement.hidden = !losses.length;
  byId("losses").replaceChildren(...losses.slice(0, 5).map((loss) => make("li", {},
    make("b", {}, `${time(loss.seconds)} `), pathLink(loss.path), ` ${loss.text}. `,
    make("span", { class: "dim" }, sentence(loss.advice)))));
}

// Divide the run into the time that memory traffic and operations need at the device's rates, and the rest.
function showBudget() {
  const sum = (key, test) => model.blocks.filter(test).reduce((total, block) => total + block[key], 0);
  const memory = sum("roofline_seconds", (block) => block.limited_by === "memory");
  const compute = sum("roofline_seconds", (block) => block.limited_by === "compute");
  const outside = sum("seconds", (block) => block.path.startsWith("("));
  const lost = Math.max(0, model.seconds - memory - compute - outside);
  const parts = [
    ["memory", "memory limit", memory], ["compute", "compute limit", compute], ["lost", "over the limits", lost],
    ["idle", "outside of blocks", outside],
  ].filter(([, , seconds]) => seconds > 0);
  const bar = make("div", { class: "bar" });
  const legend = make("div", { class: "legend" });
  for (const [name, text, seconds] of parts) {
    bar.append(make("div", { class: name }));
    bar.lastChild.style.flexGrow = ratio(seconds, model.seconds);
    const figures = `${text} ${percent(seconds, model.seconds)}, ${time(seconds)}`;
    legend.append(make("span", {}, make("i", { class: name }), figures));
  }
  byId("budget").replaceChildren(bar, legend);
}

function pathLink(path) {
  const show = () => { select("block", path); byId("explore").scrollIntoView(); };
  const exists = model.block.some((node) => node.path === path);
  return exists ? make("button", { class: "link", click: show }, path) : make("span", {}, path);
}

// -- sections, laid out when they are opened ----------------------------------------------------

function section(title, figure, content) {
  const details = make("details", {}, make("summary", {}, `${title} `, make("span", {}, figure)));
  details.addEventListener("toggle", () => details.children.length === 1 && details.append(content()));
  return details;
}

// Return a table; columns with a name that begins with "#" are numbers.
function table(head, rows) {
  const line = (tag, values) => make("tr", {}, ...values.map((value, column) =>
    make(tag, { class: head[column][0] === "#" ? "num" : "" }, value)));
  const names = head.map((name) => name.replace("#", ""));
  return make("div", { class: "scroll" }, make("table", {}, line("th", names), ...rows.map((row) => line("td", row))));
}

const COMPARED = [
  "op", "output", "dtype", "scheme", "sharding", "implementation", "limited_by", "params", "flops", "layers",
];

// Return the rows of blocks that differ from those of the other inspection, the largest difference first.
function differences() {
  const [mine, theirs] = [model, base].map(({ blocks }) => new Map(blocks.map((block) => [block.path, block])));
  const rows = [...new Set([...mine.keys(), ...theirs.keys()])].map((path) => {
    const [a, b] = [mine.get(path), theirs.get(path)];
    const changed = a && b ? COMPARED.filter((name) => a[name] !== b[name]) : [];
    const changes = a && b ? changed.map((name) => `${name}: ${b[name] || "–"} → ${a[name] || "–"}`)
      : [a ? "only here" : "only in the other"];
    return { path, a: a?.seconds ?? 0, b: b?.seconds ?? 0, changes: changes.join("; ") };
  });
  return rows.filter(({ a, b, changes }) => a !== b || changes)
    .sort((x, y) => Math.abs(y.a - y.b) - Math.abs(x.a - x.b))
    .map(({ path, a, b, changes }) => [pathLink(path), time(a), time(b), signed(a - b), changes]);
}

function passStep({ name, nodes_before, nodes_after, seconds, diff }) {
  const figures = `${nodes_before} → ${nodes_after} nodes, ${time(seconds)}`;
  if (!diff) return make("p", { class: "step" }, `${name} `, make("span", { class: "dim" }, `${figures}, no difference`));
  const classes = { "+": "better", "-": "worse" };
  return section(name, figures, () => make("pre", { tabindex: 0 }, ...diff.split("\n").map((line) =>
    make("span", { class: classes[line[0]] ?? "" }, `${line}\n`))));
}

function showSections() {
  const { findings, passes } = model;
  const parts = [
    ...findings.length ? [section("Findings", findings.length, () => table(["kind", "block", "finding", "what would change it", "#time"],
      findings.map((item) => [item.kind, pathLink(item.path), item.text, item.advice, time(item.seconds)])))] : [],
    section("Passes", `${passes.length} steps`, () => make("div", {}, ...passes.map(passStep))),
    ...Object.entries(texts[state.shown] ?? {}).map(([level, text]) => section(level.toUpperCase(),
      `${text.split("\n").length} lines`, () => make("pre", { tabindex: 0 }, text))),
  ];
  if (base) parts.unshift(section("Differences", `to ${base.name}, ${base.program}`, () => table(
    ["block", "#here", "#in the other", "#difference", "changes"], differences())));
  byId("sections").replaceChildren(...parts);
  parts[0].open = base !== undefined || findings.length > 0;
}

// -- start --------------------------------------------------------------------------------------

function showAll() {
  model = readInspection(inspections[state.shown] ?? inspections[0]);
  base = inspections[state.base] && readInspection(inspections[state.base]);
  for (const name of ["shown", "base", "search"]) byId(name).value = state[name];
  showSummary();
  fillColumns();
  showColumn(selectedKind(), false);
  showSections();
  refresh();
}

function onDocumentKey(event) {
  if (event.key === "/" && !["INPUT", "SELECT"].includes(document.activeElement.tagName)) {
    byId("search").focus();
    event.preventDefault();
  } else if (event.key === "Escape") {
    Object.assign(state, state.search ? { search: "" } : { block: "", op: "", kernel: "", layer: "" });
    byId("search").value = state.search;
    refresh();
  }
}

// Enter in the search selects the first result.
function onSearchKey(event) {
  const kind = Object.keys(KINDS).find((name) => visibleItems(name).length);
  if (event.key !== "Enter" || !kind) return;
  showColumn(kind);
  select(kind, visibleItems(kind)[0].id);
}

makeColumns();
for (const name of ["shown", "base"]) {
  byId(name).append(...inspections.map((it, index) =>
    make("option", { value: index }, `${it.name}, ${it.program}, ${time(it.seconds)}`)));
  byId(name).parentElement.hidden = inspections.length < 2;
  byId(name).addEventListener("change", (event) => { state[name] = event.target.value; showAll(); });
}
byId("search").addEventListener("input", (event) => { state.search = event.target.value.trim(); refresh(); });
byId("search").addEventListener("keydown", onSearchKey);
byId("time").addEventListener("click", (event) => nodeAtPointer(event) && select("block", nodeAtPointer(event).id));
byId("time").addEventListener("pointermove", (event) => {
  byId("pointed").textContent = nodeAtPointer(event) ? describe(nodeAtPointer(event)) : "";
});
document.addEventListener("keydown", onDocumentKey);
addEventListener("hashchange", readAddress);
addEventListener("resize", refresh);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
readAddress();
