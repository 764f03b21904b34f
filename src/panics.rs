//! A panic in the extender: the process ends with an error, and the kubelet starts another one. State that is only in
//! memory may be lost at any moment. A process that lacks a feature but reports itself healthy is useless.

use std::sync::Arc;

use tokio::sync::watch;

/// The part of the extender that panicked first, if one did.
#[derive(Clone, Debug)]
pub(crate) struct Panics(Arc<watch::Sender<Option<&'static str>>>);

impl Default for Panics {
    fn default() -> Self {
        Self(watch::Sender::new(None).into())
    }
}

impl Panics {
    /// Runs a task for as long as the runtime does. Its panic is noted.
    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        name: &'static str,
        task: impl Future<Output = T> + Send + 'static,
    ) {
        let (panics, task) = (self.clone(), tokio::spawn(task));
        tokio::spawn(async move {
            if task.await.is_err_and(|error| error.is_panic()) {
                panics.note(name);
            }
        });
    }

    /// This part panicked.
    pub(crate) fn note(&self, name: &'static str) {
        let first = |what: &mut Option<_>| match what {
            Some(_) => false,
            None => what.replace(name).is_none(),
        };
        if self.0.send_if_modified(first) {
            tracing::error!(
                part = name,
                "a part of the extender panicked: the process ends"
            );
        }
    }

    /// The part that panicked first, if one did so far.
    pub(crate) fn what(&self) -> Option<&'static str> {
        *self.0.borrow()
    }

    /// Waits until something panics.
    pub(crate) async fn noted(&self) -> &'static str {
        let mut noted = self.0.subscribe();
        // The sender lives as long as self: there is no error.
        match noted.wait_for(Option::is_some).await.map(|what| *what) {
            Ok(Some(what)) => what,
            Ok(None) | Err(_) => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn panic_of_a_task_is_noted_and_its_end_is_not() {
        let panics = Panics::default();
        panics.spawn("ends", async {});
        panics.spawn("panics", async { panic!("on purpose") });
        assert_eq!(panics.noted().await, "panics");
        panics.note("another");
        assert_eq!(panics.what(), Some("panics"));
    }
}
