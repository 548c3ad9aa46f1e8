"""Web demo of a model. `bert.demo.abilities` defines the tabs, and `bert.demo.page` the page."""
