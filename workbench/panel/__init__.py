"""The notebook application: what it shows, what its buttons do, and the widget that puts both on the page."""
