// Requests come as a picture and, while only some rows change, as all that has changed since that picture: see
// RequestsPicture and RequestsNews of workbench/panel/messages.py.

// Of several news the latest holds: each counts from the picture and not from the one before.
export function withNews(picture, ...told) {
  const [news] = told.filter((one) => one.rows && one.since === picture.number).sort((one, other) => other.number - one.number);
  if (!picture.rows || !news) return picture;
  const known = new Map(picture.rows.map((row) => [row.request_id, row]));
  for (const row of news.rows) known.set(row.request_id, merged(known.get(row.request_id), row));
  const order = news.order || picture.rows.map((row) => row.request_id);
  return { ...picture, rows: order.map((name) => known.get(name)), left_out: news.left_out, hint: news.hint };
}

// A row and those of its fields that differ, which of one that is new are all.
function merged(row, { more_blocks: more = [], ...fields }) {
  const whole = { ...row, ...fields };
  return more.length ? { ...whole, blocks: [...whole.blocks, ...more] } : whole;
}
