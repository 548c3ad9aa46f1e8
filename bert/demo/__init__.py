"""Web demo of a model: `bert.demo.abilities` defines its tabs, `bert.demo.page` the page."""
