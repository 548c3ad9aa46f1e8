"""A model as a page in the browser: `bert.demo.abilities` has what it can be asked, `bert.demo.page` the page."""
