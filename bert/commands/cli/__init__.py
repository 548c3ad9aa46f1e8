"""Parts that the commands share: arguments, help, inputs and answers, hosts."""
