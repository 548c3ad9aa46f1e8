"""HTTP server of models. `bert.serving.app` has the endpoints, `bert.serving.batching` the queue of each model."""
