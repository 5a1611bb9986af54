// Requests come as a picture and, while only some rows change, as all that has changed since that picture: see
// RequestsPicture and RequestsNews of workbench/panel/messages.py.

export function withNews(picture, news) {
  if (!picture.rows || !news.rows || news.since !== picture.number) return picture;
  const known = new Map([...picture.rows, ...news.rows].map((row) => [row.request_id, row]));
  const order = news.order || picture.rows.map((row) => row.request_id);
  return { ...picture, rows: order.map((name) => known.get(name)), left_out: news.left_out, hint: news.hint };
}
