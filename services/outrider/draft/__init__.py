"""Draft worker: proposes continuations. Knows one draft and its sequences; not the target model, Ray or tenants."""
