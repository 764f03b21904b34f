//! Disrupts pods for others: reclaims memory that pods use beyond their requests, and preempts or evicts pods if
//! fragmented memory keeps other pods waiting. It also notifies pods of memory that is reserved for them. The
//! GpustowConfig sets which of these are on, and how hard they act.
//!
//! The ledger decides which pods. Each disruption is fenced like a bind: it rests on copies of pods that came before a
//! look at the Lease, and names the copy that it is about. A new leader first writes into every pod that was asked, so
//! that its predecessor's requests that are still under way fail. The victim has a condition. The waiting pod has one
//! too, and an annotation: the next leader goes on from these.

mod conditions;
mod demand;
mod gangs;
pub(crate) mod marks;
mod memory;
mod perform;
mod resume;
mod say;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::{Group, PodFacts, names};
use gpustow_ledger::{Cause, Demands, Reserved, TURNS};
use gpustow_serve::rate::{Backoff, Window};
use k8s_openapi::jiff::Timestamp;
use tokio::time::{Instant, sleep};

use crate::app::App;
use crate::events::Kind;
use crate::leading::while_leading;
use conditions::{Ended, Says, is_settled, reservation};
use demand::under_pressure;
pub(crate) use resume::resume;

/// Between two parts of a look: filter has its turn.
const TURN: Duration = Duration::from_millis(1);
/// Between two looks.
const LOOK: Duration = Duration::from_secs(1);
/// For one request.
const TIMEOUT: Duration = Duration::from_secs(3);
const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

type Uid = Arc<str>;

/// Disrupts pods for as long as the process runs, while this replica leads.
pub(crate) async fn run(app: Arc<App>) {
    while_leading(
        app,
        LOOK,
        async |known: &mut Option<Disruptions>, app, epoch| {
            let known = known.get_or_insert_with(|| Disruptions::new(app.clone()));
            known.look(epoch).await;
        },
    )
    .await;
}

/// The work of one leadership so far.
struct Disruptions {
    app: Arc<App>,
    /// Every pod that a predecessor asked was written since this epoch began.
    fenced: Option<u64>,
    /// The reservations that waiting pods were notified of.
    told: HashMap<Uid, Told>,
    /// Pods that were just notified that their memory is free: their copies may not show it yet.
    told_free: HashMap<Uid, Instant>,
    /// Victims whose conditions this leadership wrote, and the pod that each names.
    marked: HashMap<Uid, Option<Uid>>,
    /// Pods whose eviction or deletion was taken.
    disrupted: HashSet<Uid>,
    /// Disruptions that were refused: when they are tried again, and the pauses after that.
    refused: HashMap<Uid, (Instant, Backoff)>,
    /// Gangs for which the first victims were deleted.
    begun: HashSet<Group>,
    ended: Ended,
    /// By node, in the last minute.
    lately: Window<Arc<str>>,
    /// Evictions against fragmentation in the last hour.
    defragmented: Window,
}

/// The reservation that a waiting pod was notified of.
struct Told {
    cause: Cause,
    node: Arc<str>,
    cards: Vec<Arc<str>>,
    victims: BTreeSet<Uid>,
}

impl Disruptions {
    fn new(app: Arc<App>) -> Self {
        Self {
            app,
            fenced: None,
            told: HashMap::new(),
            told_free: HashMap::new(),
            marked: HashMap::new(),
            disrupted: HashSet::new(),
            refused: HashMap::new(),
            begun: HashSet::new(),
            ended: Ended::default(),
            lately: Window::new(MINUTE),
            defragmented: Window::new(HOUR),
        }
    }

    /// How many pods may still be evicted this hour to bring memory together.
    fn evictions_left(&mut self) -> usize {
        let most = self.app.config.spec().defragment.evictions_per_hour;
        self.defragmented.left(most as usize, self.app.ledger.now())
    }

    async fn look(&mut self, epoch: u64) {
        let most = self.evictions_left();
        let app = self.app.clone();
        let ledger = &app.ledger;
        ledger.lock().tell_time(Timestamp::now().as_second());
        for means in TURNS {
            ledger.lock().look(means, most, ledger.now());
            sleep(TURN).await;
        }
        let cut = ledger.lock().searches_cut();
        cut.iter().for_each(|pod| app.events.search_cut(pod));
        let hopeless = ledger.lock().hopeless();
        hopeless.iter().for_each(|pod| app.events.hopeless(pod));
        let timeout = app.config.spec().scheduling.start_timeout.into();
        let late = ledger.lock().take_late_starts();
        late.iter()
            .for_each(|pod| app.events.start_late(pod, timeout));
        let short = under_pressure(&app).await;
        app.metrics.under_pressure(short.len());
        let (demands, marked, news) = {
            let (now, mut ledger) = (ledger.now(), ledger.lock());
            let marked: Vec<_> = ledger.marked().cloned().collect();
            let demands = ledger.demands(short, now);
            self.told_free
                .retain(|_, at| at.elapsed() < memory::SHOWN_WITHIN);
            let told = |uid: &str| self.told_free.contains_key(uid);
            (demands, marked, ledger.memory_news(told, now))
        };
        self.tell_of_reservations(&demands);
        let none = demands.is_empty() && news.is_empty();
        // It begins after every copy that this look rests on.
        if none && marked.is_empty() || app.epoch.confirm(epoch).await.is_err() {
            return;
        }
        if self.fenced != Some(epoch) {
            if !self.fence(&marked).await {
                return;
            }
            self.fenced = Some(epoch);
            // The next look begins with the pods that these writes moved.
            if !marked.is_empty() {
                return;
            }
        }
        self.tell_of_memory(&news).await;
        self.end(&marked, &demands).await;
        let (mut waits, mut late) = (HashSet::new(), HashSet::new());
        for reserved in demands.announced() {
            if !self.announce(reserved).await {
                waits.insert(reserved.pod.uid.clone());
                late.extend(reserved.gang.clone());
            }
        }
        let by_gang = demands.by_gang();
        self.begun.retain(|gang| by_gang.contains_key(gang));
        for (gang, of_gang) in by_gang.iter().filter(|(gang, _)| !late.contains(*gang)) {
            self.perform_for_gang(epoch, gang, of_gang).await;
        }
        for demand in demands.all.iter().filter(|it| it.gang.is_none()) {
            let of = demand.purpose.uid();
            if of.is_some_and(|uid| waits.contains(uid)) || self.perform(epoch, demand).await {
                continue;
            }
            // The basis of the demand has changed: the other victims of the same pod wait for the next look.
            waits.extend(of.cloned());
        }
    }

    /// Makes every disruption of a predecessor fail that is still under way. False if that must be tried again.
    async fn fence(&self, marked: &[Arc<PodFacts>]) -> bool {
        let mark = format!(
            "Asked by an earlier leader. {} continues since {}.",
            self.app.identity,
            Timestamp::now()
        );
        let asked = marked.iter().filter(|pod| pod.asked_back.is_some());
        let asked = asked.map(|pod| (pod, names::RECLAIM_CONDITION));
        let preempted = marked.iter().filter(|pod| pod.preempted);
        let preempted = preempted.map(|pod| (pod, names::DISRUPTION_TARGET));
        let all = asked.chain(preempted);
        for (pod, of_type) in all.filter(|(pod, _)| !pod.deleting) {
            let says = Says::message(of_type, &mark);
            if let Err(error) = self.write(pod, None, says).await
                && !is_settled(&error)
            {
                tracing::warn!(
                    namespace = %pod.namespace, pod = %pod.name, %error,
                    "cannot fence a pod that an earlier leader asked to give memory back or to finish: no pod is disrupted meanwhile"
                );
                return false;
            }
        }
        true
    }

    /// Ends the conditions whose time is over.
    async fn end(&mut self, marked: &[Arc<PodFacts>], demands: &Demands) {
        self.ended.retain(|uid| {
            let holds = demands.reserved_for(uid).is_some() || demands.terminates(uid);
            !(holds || demands.reclaims_from(uid))
        });
        for pod in marked.iter().filter(|pod| !pod.deleting) {
            if pod.asked_back.is_some() && !demands.reclaims_from(&pod.uid) {
                let text = "No memory is reclaimed.";
                self.end_condition(pod, names::RECLAIM_CONDITION, "GivenBack", text)
                    .await;
                self.refused.remove(&pod.uid);
                self.marked.remove(&pod.uid);
            }
            if pod.preempted && !demands.terminates(&pod.uid) {
                let (of_type, reason) = (names::DISRUPTION_TARGET, names::PREEMPTED);
                let text = "No pod needs its GPU memory now.";
                self.end_condition(pod, of_type, reason, text).await;
                self.refused.remove(&pod.uid);
                self.marked.remove(&pod.uid);
            }
            // A write would move its resourceVersion under its bind.
            let binds = || self.app.ledger.lock().reserved_because(&pod.uid).is_some();
            let ends = pod.reserved_on.is_some() && demands.reserved_for(&pod.uid).is_none();
            if ends && !binds() {
                let (of_type, text) = (names::RESERVED_CONDITION, "No memory is reserved.");
                self.end_condition(pod, of_type, "Ended", text).await;
            }
        }
        let ledger = self.app.ledger.lock();
        self.disrupted.retain(|uid| ledger.pod(uid).is_some());
        self.marked.retain(|uid, _| ledger.pod(uid).is_some());
    }

    /// Writes on the pod which memory is reserved for it, and where, before any pod is disrupted for it. False if the
    /// pod has changed.
    async fn announce(&mut self, reserved: &Reserved) -> bool {
        let pod = &reserved.pod;
        if !self.is_news(reserved) {
            return true;
        }
        let left = reserved.until.saturating_sub(self.app.ledger.now());
        let annotation = reservation(reserved, Timestamp::now() + left);
        let text = say::reserved(reserved, &annotation.until, self.give_up_after());
        let reason = match reserved.cause {
            Cause::Preempt => "Preempting",
            Cause::Defragment => "Defragmenting",
            _ => "Reclaiming",
        };
        let says = Says::condition(names::RESERVED_CONDITION, "True", reason, &text);
        let says = says.reserved(Some(&annotation));
        match self.write(pod, Some(&pod.resource_version), says).await {
            Ok(_) => {
                self.app.events.tell(Kind::MemoryReserved, pod, text);
                self.note(reserved);
                true
            }
            Err(error) => {
                if !is_settled(&error) {
                    tracing::warn!(
                        namespace = %pod.namespace, pod = %pod.name, %error,
                        "cannot write a pod's reservation on it: no pod is disrupted for it"
                    );
                }
                false
            }
        }
    }

    /// Is this reservation news for the pod? One victim less is not news. If no victim is left, there is nothing to
    /// wait for.
    fn is_news(&self, reserved: &Reserved) -> bool {
        let Some(told) = self.told.get(&reserved.pod.uid) else {
            return reserved.cause != Cause::Reclaim || !reserved.victims.is_empty();
        };
        let cards = reserved.cards.iter().map(|(uuid, _)| uuid);
        let known = |pod: &Arc<PodFacts>| told.victims.contains(&pod.uid);
        told.cause != reserved.cause
            || told.node != reserved.node
            || !cards.eq(&told.cards)
            || reserved.cause != Cause::Reserve && !reserved.victims.iter().all(known)
    }

    fn note(&mut self, reserved: &Reserved) {
        let told = Told {
            cause: reserved.cause,
            node: reserved.node.clone(),
            cards: reserved
                .cards
                .iter()
                .map(|(uuid, _)| uuid.clone())
                .collect(),
            victims: reserved.victims.iter().map(|it| it.uid.clone()).collect(),
        };
        self.told.insert(reserved.pod.uid.clone(), told);
    }

    /// Notifies pods that have waited long of their reservations, and pods of reservations that ended before their use.
    fn tell_of_reservations(&mut self, demands: &Demands) {
        for reserved in &demands.reserved {
            if reserved.cause == Cause::Reserve && self.is_news(reserved) {
                let text = say::reserved(reserved, "", self.give_up_after());
                tracing::info!(
                    namespace = %reserved.pod.namespace, pod = %reserved.pod.name, node = %reserved.node,
                    victims = reserved.victims.len(), "reserves GPUs for a pod that has waited long"
                );
                self.app
                    .events
                    .tell(Kind::MemoryReserved, &reserved.pod, text);
                self.note(reserved);
            }
        }
        let stays = |uid: &Uid| demands.reserved.iter().any(|it| it.pod.uid == *uid);
        let ended = self.told.extract_if(|uid, _| !stays(uid));
        let ledger = self.app.ledger.lock();
        for (uid, told) in ended {
            let pod = ledger.pod(&uid).filter(|pod| !pod.deleting);
            let waits = pod.filter(|pod| pod.node.is_none());
            if let Some(pod) = waits
                && ledger.reserved_because(&uid).is_none()
            {
                let text = say::ended(&told.node);
                self.app.events.tell(Kind::ReservationEnded, &pod, text);
            }
        }
    }

    fn give_up_after(&self) -> Duration {
        self.app.config.spec().reserve.give_up_after.into()
    }
}
