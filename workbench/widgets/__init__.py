"""Widgets of the notebook: anywidgets whose front-ends lie beside them as JavaScript and CSS, without a build."""
