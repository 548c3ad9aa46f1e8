"""Parts that the commands share: arguments, help, hosts, inputs and answers."""
