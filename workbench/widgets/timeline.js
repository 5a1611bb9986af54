// The timeline widget's front-end: what a person sees and does. Messages come from workbench/widgets/timeline_data.py;
// sent are {kind: "ready"} at the beginning, {kind: "lost"} after a gap, and {kind: "load"} for what was left out.
import { CARRIED } from "./timeline_carried.js";
import { shieldKeys } from "./timeline_keys.js";
import { Store } from "./timeline_store.js";
import { Texts, lengthText } from "./timeline_text.js";
import { Look } from "./timeline_look.js";
import { GUTTER } from "./timeline_brush.js";
import { Painter } from "./timeline_paint.js";
import { thingAt } from "./timeline_hit.js";
import { legendEntries } from "./timeline_legend.js";
import { View } from "./timeline_view.js";

const CLICK_REACH = 4;  // px a pointer may move and still click
const SIZE_SETTLES = 200;  // ms after which a new width is told

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

class Timeline {
  constructor(model, store, el) {
    Object.assign(this, { model, store, frame: 0, drag: null, numHints: 0 });
    this.fitsAll = !model.get("follow");  // runs that have ended are seen whole, until a person looks closer
    this.build(el);
    this.look = new Look(this.root, model.get("look"));
    this.view = new View(store);
    this.texts = new Texts(store, this.look);
    this.painter = new Painter(this.canvas, store, this.look, this.texts);
    this.stop = new AbortController();
    this.listen();
    this.root.timeline = this;
    this.changed();
  }

  build(el) {
    const button = (text, title, act, className = "") => {
      const made = element("button", { type: "button", textContent: text, title, className });
      made.addEventListener("click", act);
      return made;
    };
    this.canvas = element("canvas", { tabIndex: 0 });
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-roledescription", "timeline");
    this.status = element("span", { className: "wb-status" });
    this.notice = element("div", { className: "wb-notice", hidden: true }, element("span"));
    this.legend = element("div", { className: "wb-legend" });
    this.selected = element("div", { className: "wb-selected" });
    this.selected.setAttribute("aria-live", "polite");
    this.followButton = button("Follow", "Keep the newest at the right (End)", () => this.setFollow(!this.model.get("follow")));
    this.pauseButton = button("Cut pauses", "Take out of the axis what lies between two actions of a person (C)", () => this.setCut(!this.model.get("cut_pauses")));
    this.loadButton = button("Load", "Bring what was not sent while the engine ran", () => this.model.send({ kind: "load" }), "wb-load");
    this.moreButton = button("…", "The whole legend", () => this.openLegend());
    const bar = element("div", { className: "wb-bar" },
      button("Fit", "Show everything (Home)", () => this.fit()), this.followButton,
      button("−", "Zoom out (−)", () => this.zoom(1.5)), button("+", "Zoom in (+)", () => this.zoom(1 / 1.5)),
      this.pauseButton, this.loadButton, this.status);
    this.root = element("div", { className: "wb-timeline" }, bar,
      element("div", { className: "wb-stage" }, this.canvas, this.notice), element("div", { className: "wb-legend-line" }, this.legend, this.moreButton), this.selected);
    this.root.setAttribute("role", "group");
    this.root.setAttribute("aria-label", "Timeline");
    this.tip = element("div", { className: "wb-timeline-tip" });
    if ("popover" in this.tip) this.tip.popover = "manual";  // above everything, whatever scrolls or is clipped around us
    this.root.append(this.tip);
    el.append(this.root);
  }

  listen() {
    const { canvas, model } = this, { signal } = this.stop;
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false, signal });
    canvas.addEventListener("pointerdown", (event) => this.press(event), { signal });
    canvas.addEventListener("pointermove", (event) => this.move(event), { signal });
    canvas.addEventListener("pointerup", (event) => this.release(event), { signal });
    canvas.addEventListener("pointercancel", () => this.drop(), { signal });
    canvas.addEventListener("pointerleave", () => this.hover(null), { signal });
    canvas.addEventListener("dblclick", () => this.zoomToSelected(), { signal });
    canvas.addEventListener("blur", () => this.hover(null), { signal });
    canvas.addEventListener("keydown", (event) => this.key(event), { signal });
    shieldKeys(this.root, signal);
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolour(), { signal });
    this.themes = new MutationObserver(() => this.recolour());
    for (const place of [document.body, document.documentElement]) {
      this.themes.observe(place, { attributes: true, attributeFilter: ["class", "style", "data-jp-theme-name", "data-vscode-theme-id"] });
    }
    this.sizes = new ResizeObserver(() => {
      if (this.look.isKnown) this.redraw();
      else this.recolour();
      this.fitLegend();
      clearTimeout(this.sizeTimer);
      this.sizeTimer = setTimeout(() => this.set("width", this.canvas.clientWidth), SIZE_SETTLES);
    });
    this.sizes.observe(this.canvas);
    // What was painted while nobody could see it may be blank, or in the colours of another theme.
    this.sights = new IntersectionObserver((entries) => { if (entries[entries.length - 1].isIntersecting) this.seen(); });
    this.sights.observe(this.canvas);
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.seen(); }, { signal });
    model.on("change:selected_iteration", () => this.selectionChanged());
    model.on("change:follow", () => this.changed());
    model.on("change:hint", () => this.changed());
    model.on("change:cut_pauses", () => this.cutChanged());
  }

  destroy() {
    this.stop.abort();
    this.themes.disconnect();
    this.sizes.disconnect();
    this.sights.disconnect();
    cancelAnimationFrame(this.frame);
    clearTimeout(this.sizeTimer);
    this.root.remove();
  }

  // -- what is shown ----------------------------------------------------------------------------------------------

  // New data, or another state of the buttons.
  changed() {
    const { model, store } = this, isFollowing = model.get("follow");
    if (isFollowing && !store.isEmpty) {
      this.view.followNewest();
      this.hover(null);
    } else if (this.fitsAll && !store.isEmpty) this.view.fit();
    this.followButton.setAttribute("aria-pressed", String(isFollowing));
    this.pauseButton.setAttribute("aria-pressed", String(model.get("cut_pauses")));
    this.pauseButton.hidden = !store.axis.pauses.length;
    this.loadButton.hidden = !store.hasSkipped;
    this.say(this.emptyText());
    this.showSelected();
    this.showLegend();
    this.redraw();
  }

  // To the rest of the panel that this view stands in.
  handOn(carried) { this.root.dispatchEvent(new CustomEvent(CARRIED, { bubbles: true, detail: carried })); }

  redraw() { if (!this.frame) this.frame = requestAnimationFrame(() => this.paint()); }

  paint() {
    this.frame = 0;
    if (!this.look.isKnown) return;
    const begin = performance.now();
    const selected = this.model.get("selected_iteration");
    // First what is written, for the painter asks for the canvas's width, and the page lays out what was written by then.
    this.status.textContent = this.statusText();
    this.canvas.setAttribute("aria-label", this.texts.summary(this.view));
    this.painter.draw(this.view, selected === undefined ? null : selected);
    this.paintTime = performance.now() - begin;
  }

  statusText() {
    const { store, view } = this;
    if (store.isEmpty) return "";
    const parts = [this.texts.shownIterations(view), `${lengthText(view.length)} in view`, `${store.numSpans.toLocaleString("en")} spans`];
    if (store.isTrimmed) parts.push("older ones dropped");
    return parts.filter(Boolean).join(" · ");
  }

  say(text) {
    this.notice.hidden = !text;
    this.notice.firstChild.textContent = text;
  }

  // What to do where nothing is to be seen: in a panel by its keys.
  emptyText() {
    if (!this.store.isEmpty) return "";
    const isInPanel = this.root.closest(".wb-panel-whole") !== null;
    return isInPanel ? "Nothing has run yet: P runs one phase, S one iteration, R all; Submit… hands in a request." : this.model.get("hint");
  }

  // A few words that go away by themselves.
  hint(text) {
    this.say(text);
    clearTimeout(this.fading);
    this.fading = setTimeout(() => this.say(this.emptyText()), 1600);
  }

  showSelected() {
    const number = this.model.get("selected_iteration");
    const text = number === null || number === undefined ? "" : this.texts.selected(number) || `iteration ${number} is not in the timeline`;
    if (this.selected.textContent !== text) this.selected.textContent = text;
  }

  showLegend() {
    const entries = legendEntries(this.store, this.look), key = JSON.stringify(entries);
    if (key === this.legendKey) return;
    this.legendKey = key;
    this.legend.replaceChildren(...entries.map(([text, style]) => {
      const chip = element("i");
      Object.assign(chip.style, style);
      return element("span", {}, chip, text);
    }));
    this.fitLegend();
  }

  // One line of it, and a button for the rest where there is more.
  fitLegend() {
    const { legend, moreButton } = this;
    moreButton.hidden = !legend.classList.contains("wb-whole") && legend.scrollHeight <= legend.clientHeight + 2;
  }

  openLegend() {
    const isOpen = this.legend.classList.toggle("wb-whole");
    this.moreButton.setAttribute("aria-expanded", String(isOpen));
    this.fitLegend();
  }

  seen() {
    this.say(this.emptyText());  // it may have come into a panel since
    this.recolour();
  }

  recolour() {
    this.look.refresh();
    if (this.look.isKnown) this.set("theme", this.root.dataset.theme);
    this.showLegend();
    this.redraw();
  }

  // -- what a person does -----------------------------------------------------------------------------------------

  set(name, value) {
    if (this.model.get(name) === value) return;
    this.model.set(name, value);
    this.model.save_changes();
  }

  setFollow(value) {
    this.fitsAll = false;
    this.set("follow", value);
  }

  setCut(value) { this.set("cut_pauses", value); }

  cutChanged() {
    const isCut = this.model.get("cut_pauses");
    if (this.store.axis.isCut !== isCut) this.store.cut(isCut);
    this.view.isChosen = false;
    if (!this.model.get("follow")) this.view.fit();
    this.changed();
  }

  fit() {
    this.setFollow(false);
    this.view.fit();
    this.redraw();
  }

  // Around the pointer; while following around the newest, which stays where it is.
  zoom(factor, x = null) {
    const { view, painter } = this, edge = this.store.extent().to;
    this.fitsAll = false;
    const around = this.model.get("follow") ? edge : x === null ? (view.from + view.to) / 2 : painter.shownAt(x);
    view.zoom(factor, around);
    this.changed();
  }

  pan(part) {
    this.setFollow(false);
    this.view.isChosen = true;
    this.view.pan(part);
    this.hover(null);
    this.redraw();
  }

  wheel(event) {
    if (document.activeElement !== this.canvas && !event.ctrlKey && !event.metaKey) {
      if (this.numHints++ < 2) this.hint("Click the timeline first, or hold Ctrl: then the wheel zooms.");
      return;  // the page scrolls
    }
    event.preventDefault();
    this.hover(null);
    const size = event.deltaMode === 1 ? 18 : 1, sideways = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(sideways * size / (this.painter.width - GUTTER));
    else this.zoom(Math.exp(event.deltaY * size * (event.ctrlKey ? 0.01 : 0.0016)), Math.max(GUTTER, this.place(event).x));
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  press(event) {
    if (event.button !== 0) return;
    this.canvas.focus({ preventScroll: true });
    this.canvas.setPointerCapture(event.pointerId);
    this.drag = { begin: event.clientX, last: event.clientX, isClick: true };
  }

  move(event) {
    if (!this.drag) { this.hover(event); return; }
    const { drag } = this;
    if (Math.abs(event.clientX - drag.begin) > CLICK_REACH) drag.isClick = false;
    if (drag.isClick) return;
    this.canvas.classList.add("wb-dragged");
    this.pan((drag.last - event.clientX) / (this.painter.width - GUTTER));
    drag.last = event.clientX;
  }

  release(event) {
    const isClick = this.drag && this.drag.isClick, { x, y } = this.place(event);
    this.drop();
    const thing = isClick ? thingAt(this.painter, x, y) : null;
    if (thing && thing.iteration >= 0) this.set("selected_iteration", thing.iteration);
  }

  drop() {
    this.drag = null;
    this.canvas.classList.remove("wb-dragged");
  }

  hover(event) {
    const { x, y } = event ? this.place(event) : {}, thing = event ? thingAt(this.painter, x, y) : null;
    this.canvas.classList.toggle("wb-over", thing !== null && thing.iteration >= 0);
    if (!thing) { this.showTip(false); return; }
    this.tip.replaceChildren(element("b", { textContent: thing.lines[0] }), thing.lines.slice(1).join("\n"));
    this.showTip(true);
    const { offsetWidth: wide, offsetHeight: tall } = this.tip, below = event.clientY + 16;
    this.tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, window.innerWidth - wide - 8))}px`;
    this.tip.style.top = `${below + tall > window.innerHeight ? Math.max(4, event.clientY - tall - 10) : below}px`;
  }

  showTip(isShown) {
    if (!this.tip.popover) this.tip.classList.toggle("wb-plain", isShown);
    else if (isShown !== this.tip.matches(":popover-open")) this.tip.togglePopover(isShown);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const acts = {
      "+": () => this.zoom(1 / 1.4), "=": () => this.zoom(1 / 1.4), "-": () => this.zoom(1.4), w: () => this.zoom(1 / 1.4), s: () => this.zoom(1.4),
      ArrowLeft: () => this.pan(-0.15), ArrowRight: () => this.pan(0.15), a: () => this.pan(-0.15), d: () => this.pan(0.15),
      ArrowUp: () => this.selectNext(-1), ArrowDown: () => this.selectNext(1), Home: () => this.fit(), 0: () => this.fit(),
      End: () => this.setFollow(true), f: () => this.zoomToSelected(), c: () => this.setCut(!this.model.get("cut_pauses")),
      Escape: () => this.set("selected_iteration", null),
    };
    const act = acts[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act) return;
    event.preventDefault();
    this.hover(null);
    act();
  }

  // -- selection --------------------------------------------------------------------------------------------------

  selectNext(step) {
    const group = this.store.groups.find((one) => one.iterations && one.iterations.length);
    if (!group) return;
    const { iterations } = group, current = this.model.get("selected_iteration"), row = current === null ? -1 : group.rowOf(current);
    const next = row < 0 ? iterations.length - 1 : Math.min(Math.max(row + step, 0), iterations.length - 1);
    this.set("selected_iteration", iterations.number[next]);
  }

  stretchOf(number) {
    for (const group of this.store.groups) {
      const row = number === null ? -1 : group.rowOf(number);
      if (row >= 0) return [group.iterations.at[row], group.iterations.till[row]];
    }
    return null;
  }

  selectionChanged() {
    const stretch = this.stretchOf(this.model.get("selected_iteration"));
    if (stretch && (stretch[0] < this.view.from || stretch[1] > this.view.to)) {
      this.setFollow(false);
      this.view.reveal(...stretch);
    }
    this.showSelected();
    this.redraw();
  }

  zoomToSelected() {
    const stretch = this.stretchOf(this.model.get("selected_iteration"));
    if (!stretch) return;
    this.setFollow(false);
    this.view.reveal(...stretch, true);
    this.redraw();
  }
}

// One store a model, however many views of it are open.
export default () => {
  const views = new Set();
  let store;
  return {
    initialize({ model }) {
      store = new Store(model.get("max_spans"), model.get("cut_pauses"));
      model.on("msg:custom", (content, buffers) => {
        if (content.kind !== "carried" && !store.receive(content, buffers)) model.send({ kind: "lost" });
        for (const view of views) view.changed();
        if (content.carried) for (const view of views) view.handOn(content.carried);
      });
      model.on("change:max_spans", () => { store.maxSpans = model.get("max_spans"); });
      model.send({ kind: "ready" });
    },
    render({ model, el }) {
      const view = new Timeline(model, store, el);
      views.add(view);
      return () => { views.delete(view); view.destroy(); };
    },
  };
};
