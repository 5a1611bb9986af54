// The legend: names and marks that are in the picture, those of one colour together.
import { REWIND } from "./timeline_marks.js";

const SEARCHED = 2000;  // newest rows of a table in which names are looked for

// [text, style of its chip] each.
export function legendEntries(store, look) {
  const byColour = new Map(), { work, orders, waits, hasCollective, hasDrafts, hasBubble } = namesIn(store, look);
  for (const [name, colour] of work) byColour.set(colour, [...(byColour.get(colour) || []), name]);
  const lines = (colour, under = "transparent") => ({ background: `repeating-linear-gradient(-45deg, ${colour} 0 1px, transparent 1px 4px), ${under}` });
  const chip = (colour, names) => (names.some((name) => look.dummies.has(name)) ? lines(look.dummy, colour) : { background: colour });
  const kind = (colour) => (colour === look.phases.copy ? " (copies)" : "");
  const entries = [...byColour].map(([colour, names]) => [names.join(", ") + kind(colour), chip(colour, names)]);
  if ([...waits].some((name) => name !== look.ranksWait)) entries.push(["host waits for the device", lines(look.wait)]);
  const ofRanks = [];  // in front: a folded legend shows its first row, and they are what ranks are looked at for
  if (waits.has(look.ranksWait)) ofRanks.push(["host waits for other ranks", lines(look.ranks, look.under("ranks"))]);
  if (hasCollective) ofRanks.push(["device is in a collective with other ranks", { ...lines(look.ranks, look.under("ranks")), height: "5px", alignSelf: "flex-end", marginBottom: "3px" }]);
  if (hasBubble) entries.push(["device idle (bubble)", lines(look.bubble)]);
  if (hasDrafts) entries.push(["accepted drafts", { background: look.draft, width: "7px" }], ["drafts turned down", { background: look.turned, width: "3px" }]);
  return [...ofRanks, ...entries, ...orders.map((order) => [`iteration: ${order}`, { background: look.order(order), borderRadius: "6px" }])];
}

function namesIn(store, look) {
  const work = new Map(), orders = new Set(), lanes = store.groups.flatMap((group) => group.lanes);
  const add = (name, lane) => work.set(name, look.work(name, lane, "other"));
  for (const { name: lane, tables } of lanes) {
    for (const table of [tables.bar, tables.detail]) for (const name of table ? newest(table, "name") : []) add(store.texts[name], lane);
  }
  for (const group of store.groups) {
    for (const one of group.unfinished) add(one.name, one.lane);
    if (group.iterations) for (const order of newest(group.iterations, "order")) orders.add(store.texts[order]);
    if (group.inHand) orders.add(group.inHand.order);
  }
  return {
    work: sortedBy(Object.keys(look.phases), [...work], ([name]) => name),
    orders: sortedBy(Object.keys(look.orders), [...orders], (order) => order),
    waits: new Set(lanes.flatMap((lane) => (lane.tables.wait && !lane.hasCollectives ? [...newest(lane.tables.wait, "name")].map((name) => store.texts[name]) : []))),
    hasCollective: lanes.some((lane) => lane.hasCollectives),
    hasDrafts: lanes.some(({ tables: { instant } }) => instant && [...newest(instant, "name")].some((name) => store.texts[name] === REWIND)),
    hasBubble: store.groups.some((group) => group.bubbles && group.bubbles.length),
  };
}

function newest(table, column) {
  return new Set(table[column].subarray(Math.max(0, table.length - SEARCHED), table.length));
}

// In the order of the known names; others behind them.
function sortedBy(known, things, nameOf) {
  const rank = (thing) => (known.indexOf(nameOf(thing)) + known.length + 1) % (known.length + 1);
  return things.sort((left, right) => rank(left) - rank(right));
}
