//! What a client is told when a request cannot be served.

use crate::queue::Refused;
use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use sd_runtime::{Error, ErrorKind};
use serde_json::json;

/// A status with `{"error": message}`.
#[derive(Debug)]
pub(crate) struct Failure {
    status: StatusCode,
    message: String,
}

impl Failure {
    /// With that status.
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Failure {
        Failure { status, message: message.into() }
    }

    /// The request is at fault.
    pub(crate) fn bad(message: impl Into<String>) -> Failure {
        Failure::new(StatusCode::BAD_REQUEST, message)
    }

    /// The server ends before the request's turn.
    pub(crate) fn stopping() -> Failure {
        Failure::new(StatusCode::SERVICE_UNAVAILABLE, "the server is stopping")
    }

    /// What the client reads.
    #[cfg(test)]
    pub(crate) fn message(&self) -> &str {
        &self.message
    }
}

impl From<&Error> for Failure {
    fn from(e: &Error) -> Failure {
        let status = match e.kind() {
            ErrorKind::Request(_) | ErrorKind::Unsupported(_) => StatusCode::BAD_REQUEST,
            ErrorKind::Cancelled => return Failure::new(StatusCode::CONFLICT, "the request was interrupted"),
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Failure::new(status, e.to_string())
    }
}

impl From<Refused> for Failure {
    fn from(refused: Refused) -> Failure {
        match refused {
            Refused::Full => Failure::new(StatusCode::TOO_MANY_REQUESTS, "the queue is full, try again later"),
            Refused::Stopping => Failure::stopping(),
        }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        (self.status, Json(json!({"error": self.message}))).into_response()
    }
}
