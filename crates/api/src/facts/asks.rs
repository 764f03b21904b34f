use std::sync::{Arc, LazyLock};

use gpustow_pack::{Claim, Request};

use crate::BadRequest;

/// Most pods of a cluster do not request GPU memory: they share this empty value.
static NO_REQUEST: LazyLock<Arc<Request>> = LazyLock::new(Arc::default);

/// The request of a pod. Other crates make it only with [`Asks::of`].
#[derive(Clone, Debug, PartialEq)]
pub enum Asks {
    /// No GPU memory: the request is without claims, and lists the pod's request of its host.
    #[non_exhaustive]
    Nothing(Arc<Request>),
    /// An invalid request.
    Unreadable(BadRequest),
    /// GPU memory: the request has claims.
    #[non_exhaustive]
    For(Arc<Request>),
}

impl Asks {
    /// Neither GPU memory nor anything of a host.
    pub(crate) fn nothing() -> Self {
        Self::Nothing(NO_REQUEST.clone())
    }

    /// The request of a pod as an `Asks`.
    #[must_use]
    pub fn of(request: impl Into<Arc<Request>>) -> Self {
        match request.into() {
            it if !it.is_empty() => Self::For(it),
            it if it == *NO_REQUEST => Self::nothing(),
            it => Self::Nothing(it),
        }
    }

    /// The request for GPU memory, if it is one.
    #[must_use]
    pub fn request(&self) -> Option<&Arc<Request>> {
        match self {
            Self::For(request) => Some(request),
            Self::Nothing(_) | Self::Unreadable(_) => None,
        }
    }

    /// The request, with or without GPU memory.
    ///
    /// # Errors
    /// Why it cannot be honoured.
    pub fn readable(&self) -> Result<&Arc<Request>, &BadRequest> {
        match self {
            Self::For(request) | Self::Nothing(request) => Ok(request),
            Self::Unreadable(bad) => Err(bad),
        }
    }

    /// One entry per container that asks.
    #[must_use]
    pub fn claims(&self) -> &[Claim] {
        self.request().map_or(&[], |request| &request.claims)
    }

    /// True if the pod does not request GPU memory, false if its request is unreadable.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        matches!(self, Self::Nothing(_))
    }

    /// True if it asks for whole GPUs.
    #[must_use]
    pub fn is_exclusive(&self) -> bool {
        self.request().is_some_and(|request| request.exclusive)
    }

    /// Changes the request, if there is one.
    pub fn change(&mut self, change: impl FnOnce(&mut Request)) {
        if let Self::For(request) | Self::Nothing(request) = self {
            change(Arc::make_mut(request));
            *self = Self::of(request.clone());
        }
    }
}
