"""The service over HTTP: request bodies and answers only; decisions are in `dosapp.service`."""
