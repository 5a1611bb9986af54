// Making elements, and changing no more of them than what changed: so focus, selection and scroll survive updates.

// `properties` are the element's own; attributes such as aria-label go into `properties.attributes`.
export function make(name, { attributes = {}, ...properties } = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// The one way in which words come into the page: never as HTML.
export function setText(node, text) {
  const words = text === null || text === undefined ? "" : String(text);
  if (node.textContent !== words) node.textContent = words;
}

let numIds = 0;

// For a page that may hold many widgets, each with these modules of its own.
export function makeId() { return `wb-${Math.random().toString(36).slice(2)}-${numIds++}`; }

// null takes the attribute away.
export function setAttribute(node, name, value) {
  if (value === null || value === undefined) { if (node.hasAttribute(name)) node.removeAttribute(name); }
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export function setProperty(node, name, value) { if (node[name] !== value) node[name] = value; }

export function setStyle(node, name, value) {
  if (node.style.getPropertyValue(name) !== value) node.style.setProperty(name, value);
}

export function setClass(node, name, isOn) { if (node.classList.contains(name) !== Boolean(isOn)) node.classList.toggle(name, Boolean(isOn)); }

// A cell that cuts its words off has them whole in its title.
export function setCutText(node, text) { setText(node, text); setProperty(node, "title", text || ""); }

// A button that can be seen and focused while it would do nothing: one that is `disabled` would drop the focus, and
// with it the panel's keys.
export function makeButton(text, title, act, { name = text, className = "" } = {}) {
  const made = make("button", { type: "button", className, title, textContent: text, attributes: { "aria-label": name } });
  made.addEventListener("click", (event) => { if (isEnabled(made)) act(event); });
  return made;
}

export function enable(button, isOn) { setAttribute(button, "aria-disabled", isOn ? null : "true"); }

export function isEnabled(button) { return button.getAttribute("aria-disabled") !== "true"; }

// One child a thing in the order of `things`, kept by key from one call to the next.
//   build(thing) makes a child, update(child, thing, place) fills it.
export function keepChildren(parent, things, keyOf, build, update) {
  const known = parent.keptChildren || new Map(), kept = new Map(), focused = document.activeElement;
  for (const thing of things) {
    const key = keyOf(thing);
    kept.set(key, known.get(key) || build(thing));
  }
  for (const [key, child] of known) if (!kept.has(key)) child.remove();
  let next = parent.firstChild;
  for (const child of kept.values()) {
    if (child === next) next = next.nextSibling; else parent.insertBefore(child, next);
  }
  parent.keptChildren = kept;
  things.forEach((thing, place) => update(kept.get(keyOf(thing)), thing, place));
  if (focused !== document.activeElement && parent.contains(focused)) focused.focus({ preventScroll: true });
}

// Keys for things that have none of their own: what they say, and how often it was said before.
export function countedKeys(things, textOf) {
  const counts = new Map();
  return things.map((thing) => {
    const text = textOf(thing), count = counts.get(text) || 0;
    counts.set(text, count + 1);
    return `${text}\u0000${count}`;
  });
}

// Children by place, where what stands at a place is as good as any other.
export function fillChildren(parent, things, build, update) {
  while (parent.childElementCount > things.length) parent.lastElementChild.remove();
  things.forEach((thing, place) => {
    const child = parent.children[place] || parent.appendChild(build());
    update(child, thing, place);
  });
}

// A table whose head stays in view: [heading, class of the column's cells, title] a column.
export function makeTable(label, columns) {
  const head = make("tr", {}, ...columns.map(([text, className = "", title = ""]) => make("th", { className, title, textContent: text, scope: "col" })));
  const body = make("tbody");
  const table = make("table", { className: "wb-table", attributes: { "aria-label": label } },
    make("colgroup", {}, ...columns.map(([, className = ""]) => make("col", { className }))), make("thead", {}, head), body);
  return { table, body };
}

// A row of empty cells under such columns.
export function makeRow(columns) { return make("tr", {}, ...columns.map(([, className = ""]) => make("td", { className }))); }

export function counted(count, one, many = `${one}s`) { return `${count.toLocaleString("en")} ${count === 1 ? one : many}`; }

// By digits behind the point; made once, for that takes longer than many numbers.
const FORMATS = [0, 1, 2, 3].map((digits) => new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));

// "3.42 ms" without its unit: three digits that count, none where nothing is known.
export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  return FORMATS[value < 1 ? 3 : value < 10 ? 2 : value < 100 ? 1 : 0].format(value);
}

// 3, 4, 5, 9 as "3–5, 9".
export function rangesText(numbers) {
  const ranges = [];
  for (const number of numbers) {
    const last = ranges[ranges.length - 1];
    if (last && number === last[1] + 1) last[1] = number; else ranges.push([number, number]);
  }
  return ranges.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ");
}

// Bytes that came as base64.
export function unpacked(packed) { return Uint8Array.from(atob(packed), (one) => one.charCodeAt(0)); }

export function percent(share) { return `${(100 * share).toLocaleString("en", { maximumFractionDigits: share && share < 0.1 ? 1 : 0 })} %`; }
