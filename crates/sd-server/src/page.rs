//! The page at `/`.

use crate::app::App;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_SECURITY_POLICY;
use axum::response::{Html, IntoResponse, Response};
use std::sync::Arc;

/// Needs nothing from elsewhere.
const PAGE: &str = include_str!("page.html");

/// The page asks this server only, and runs no code but its own.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; \
    connect-src 'self'";

/// The built-in page, or the user's.
pub(crate) async fn page(State(app): State<Arc<App>>) -> Response {
    let Some(path) = &app.page else {
        return ([(CONTENT_SECURITY_POLICY, POLICY)], Html(PAGE)).into_response();
    };
    match std::fs::read_to_string(path) {
        Ok(text) => Html(text).into_response(),
        Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{}: {e}", path.display())).into_response(),
    }
}
