//! Has pods give memory back that they use beyond their requests, for those who have a right to it and wait for it
//! or could not grow into it, or because they are over their limits; as hard as operator and owner let us.
//!
//! Whom is the ledger's answer. Each act is fenced like a bind: it rests on copies of pods that came before a
//! look at the Lease, and names the copy that it is about. A new holder of the epoch writes into every pod that
//! was asked before it asks anybody itself, so that what its predecessor still has under way fails. Whoever was
//! asked bears a condition, and so does the pod that it is for: a successor goes on from those.
//! Preemption for pods that free memory is too scattered for, and moves for them, keep the same rules (`scattered`).

mod ended;
mod pace;
mod resume;
mod scattered;
mod victim;
mod write;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::act::Act;
use gpustow_api::{PodFacts, kept, names};
use gpustow_ledger::{CallBack, Preemption};
use k8s_openapi::api::policy::v1::Eviction;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{DeleteOptions, Preconditions};
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, PostParams};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::app::App;
use crate::ask::{AskError, within};
use ended::Ended;
use pace::{Moves, Pace};
pub(crate) use resume::resume;
use victim::{Victim, Whom, name, shortages, victims};
use write::{condition, is_settled};

/// Between two parts of a look: filter has its turn.
const TURN: Duration = Duration::from_millis(1);
/// Between two looks.
const LOOK: Duration = Duration::from_secs(1);
/// For one write.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Before a refused eviction is tried again; twice as long after each refusal, up to [`MAX_PAUSE`].
const PAUSE: Duration = Duration::from_secs(2);
const MAX_PAUSE: Duration = Duration::from_secs(60);

type Uid = Arc<str>;

/// Acts for as long as the process runs, while it decides.
pub(crate) async fn run(app: Arc<App>) {
    let mut acts = Acts::new(app.clone());
    loop {
        sleep(LOOK).await;
        match app.epoch.held() {
            Some(epoch) if app.lists.missing().is_empty() && !app.is_draining() => {
                acts.look(epoch).await;
            }
            _ => {
                app.metrics.call_backs.set(0);
                app.metrics.short_gpus.set(0);
                acts = Acts::new(app.clone());
            }
        }
    }
}

/// What one tenure has done.
struct Acts {
    app: Arc<App>,
    /// Every pod that was asked by a predecessor was written since this epoch began.
    fenced: Option<u64>,
    /// What the conditions of pods that wait say, but for the time.
    kept: HashMap<Uid, String>,
    /// Evictions that were refused: when they are tried again, and the pause after that.
    refused: HashMap<Uid, (Instant, Duration)>,
    /// Victims whose conditions this tenure wrote.
    told: HashSet<Uid>,
    /// Pods whose eviction was taken.
    evicted: HashSet<Uid>,
    ended: Ended,
    pace: Pace,
    moves: Moves,
}

impl Acts {
    fn new(app: Arc<App>) -> Self {
        Self {
            fenced: None,
            kept: HashMap::new(),
            refused: HashMap::new(),
            told: HashSet::new(),
            evicted: HashSet::new(),
            ended: Ended::default(),
            pace: Pace::default(),
            moves: Moves::default(),
            app,
        }
    }

    /// How many pods may still be evicted this hour to bring memory together.
    fn moves_left(&mut self) -> usize {
        let most = self.app.config.spec().defragment.evictions_per_hour;
        self.moves.left(most)
    }

    /// Takes one disruption on the node, if the limits allow it now.
    fn may_disrupt(&mut self, node: &Arc<str>) -> bool {
        self.pace.may(node, &self.app.config.spec().disruptions)
    }

    async fn look(&mut self, epoch: u64) {
        let may_move = self.moves_left() > 0;
        let ledger = self.app.ledger.clone();
        let now = || ledger.now();
        {
            let now = now();
            let mut ledger = ledger.lock();
            ledger.tell_time(Timestamp::now().as_second());
            ledger.call_back(now);
        }
        sleep(TURN).await;
        let due = ledger.lock().scattered(now());
        sleep(TURN).await;
        let to_move = may_move.then(|| ledger.lock().due_to_move(now())).flatten();
        sleep(TURN).await;
        let short = shortages(&self.app).await;
        let (backs, over, marked) = {
            let (now, ledger) = (now(), ledger.lock());
            let marked: Vec<_> = ledger.marked().cloned().collect();
            (ledger.call_backs(now), ledger.over_limits(now), marked)
        };
        let metrics = &self.app.metrics;
        metrics.call_backs.set(count(backs.len()));
        metrics.short_gpus.set(count(short.len()));
        let none = backs.is_empty() && short.is_empty() && over.is_empty() && due.is_empty();
        let none = none && to_move.is_none();
        if none && marked.is_empty() && self.preemptions().is_empty() {
            return;
        }
        // It begins after every copy that this look rests on.
        if self.app.epoch.confirm(epoch).await.is_err() {
            return;
        }
        if self.fenced != Some(epoch) {
            if !self.fence(&marked).await {
                return;
            }
            // What these writes moved is looked at anew.
            self.fenced = Some(epoch);
            return;
        }
        self.choose(&due, to_move.as_deref()).await;
        let preemptions = self.preemptions();
        let victims = victims(&backs, short, over);
        self.end(&marked, &backs, &preemptions, &victims).await;
        for back in &backs {
            self.keep(back).await;
        }
        for victim in victims.values() {
            let uid = &victim.pod.uid;
            if victim.pod.asked_back.is_some() && !self.told.contains(uid) {
                // Instead of what the fence wrote; it is no act.
                let says = json!({"type": names::GIVE_BACK, "message": victim.told()});
                if self.try_write(&victim.pod, says).await {
                    self.told.insert(uid.clone());
                }
            } else if self.may_act(victim) {
                self.act(epoch, victim).await;
            }
        }
        for preemption in &preemptions {
            self.preempt(epoch, preemption).await;
        }
    }

    /// Makes every act of a predecessor fail that is still under way. False if that is to be tried again.
    async fn fence(&self, marked: &[Arc<PodFacts>]) -> bool {
        let mark = format!(
            "Asked by an earlier extender; {} goes on since {}",
            self.app.identity,
            Timestamp::now()
        );
        let asked = marked.iter().filter(|pod| pod.asked_back.is_some());
        let asked = asked.map(|pod| (pod, names::GIVE_BACK));
        let preempted = marked.iter().filter(|pod| pod.preempted);
        let preempted = preempted.map(|pod| (pod, names::DISRUPTION_TARGET));
        let all = asked.chain(preempted);
        for (pod, of_type) in all.filter(|(pod, _)| !pod.deleting) {
            let condition = json!({"type": of_type, "message": mark});
            if let Err(error) = self.write(pod, None, condition).await
                && !is_settled(&error)
            {
                tracing::warn!(
                    namespace = %pod.namespace, pod = %pod.name, %error,
                    "cannot fence a pod that was asked to give memory back or to end: nobody is asked meanwhile"
                );
                return false;
            }
        }
        true
    }

    /// Ends the conditions whose time is over.
    async fn end(
        &mut self,
        marked: &[Arc<PodFacts>],
        backs: &[CallBack],
        preemptions: &[Preemption],
        victims: &BTreeMap<Uid, Victim>,
    ) {
        let is_kept = |uid: &str| {
            backs.iter().any(|back| *back.pod.uid == *uid)
                || preemptions.iter().any(|it| *it.pod.uid == *uid)
        };
        let ends = |uid: &str| {
            let mut victims = preemptions.iter().flat_map(|it| &it.victims);
            victims.any(|pod| *pod.uid == *uid)
        };
        self.ended
            .retain(|uid| !(is_kept(uid) || ends(uid) || victims.contains_key(uid)));
        for pod in marked.iter().filter(|pod| !pod.deleting) {
            if pod.asked_back.is_some() && !victims.contains_key(&pod.uid) {
                let text = "Nothing is called back";
                self.end_condition(pod, names::GIVE_BACK, "GivenBack", text)
                    .await;
                self.refused.remove(&pod.uid);
                self.told.remove(&pod.uid);
            }
            if pod.preempted && !ends(&pod.uid) {
                let (of_type, reason) = (names::DISRUPTION_TARGET, names::PREEMPTED);
                let text = "Nobody needs its GPU memory any more";
                self.end_condition(pod, of_type, reason, text).await;
                self.refused.remove(&pod.uid);
            }
            // A write would move its resourceVersion under its bind.
            let binds = || self.app.ledger.lock().reserved_because(&pod.uid).is_some();
            if pod.kept_on.is_some() && !is_kept(&pod.uid) && !binds() {
                let (of_type, text) = (names::KEPT_CONDITION, "No room is kept");
                self.end_condition(pod, of_type, "Ended", text).await;
            }
        }
        self.kept.retain(|uid, _| is_kept(uid));
        let ledger = self.app.ledger.lock();
        self.evicted.retain(|uid| ledger.pod(uid).is_some());
        self.told.retain(|uid| ledger.pod(uid).is_some());
    }

    /// Says on the pod that room is kept for it, and where.
    async fn keep(&mut self, back: &CallBack) {
        let pod = &back.pod;
        let cards = back
            .cards
            .iter()
            .map(|(uuid, mib)| format!("{mib} of GPU {uuid}"));
        let cards = cards.collect::<Vec<_>>().join(" and ");
        let mut from: Vec<String> = back.victims.iter().map(|it| name(&it.pod)).collect();
        from.sort_unstable();
        from.dedup();
        let from = match from.is_empty() {
            true => String::new(),
            false => format!(" are called back from {}", from.join(", ")),
        };
        let what = format!("{cards}{from}");
        if self.kept.get(&pod.uid) == Some(&what) || from.is_empty() {
            return;
        }
        let left = back.until.saturating_sub(self.app.ledger.now());
        let until = Timestamp::now() + left;
        let text = kept::message(&back.node, &kept::until_then(&what, until));
        let says = condition(names::KEPT_CONDITION, "True", "CalledBack", &text);
        if self.try_write(pod, says).await {
            self.app
                .events
                .calls_back(pod, format!("Room is kept {text}"));
            self.kept.insert(pod.uid.clone(), what);
        }
    }

    /// Is there something to do about this pod now, and may it be done?
    fn may_act(&mut self, victim: &Victim) -> bool {
        let pod = &victim.pod;
        let act = self.act_on(pod);
        if pod.asked_back.is_some_and(|done| done >= act) {
            let waits = self
                .refused
                .get(&pod.uid)
                .is_some_and(|(at, _)| *at > Instant::now());
            return act == Act::Evict && !waits && !self.evicted.contains(&pod.uid);
        }
        let may = self.may_disrupt(&victim.node);
        if !may {
            tracing::warn!(
                node = %victim.node, namespace = %pod.namespace, pod = %pod.name,
                "more disruptions than spec.disruptions of the GpustowConfig allows: this one waits"
            );
        }
        may
    }

    /// What the administrator wants, softened by the pod's owner where that is allowed.
    fn act_on(&self, pod: &PodFacts) -> Act {
        gpustow_settings::ledger(&self.app.config.spec()).action_on(pod)
    }

    /// Is the pod to give memory back still? The look that said so may be some requests old.
    fn is_victim(&self, victim: &Victim) -> bool {
        let now = self.app.ledger.now();
        let ledger = self.app.ledger.lock();
        let backs = ledger.call_backs(now);
        let short = ledger.shortages_on(&victim.node, now);
        victims(&backs, short, ledger.over_limits(now)).contains_key(&victim.pod.uid)
    }

    async fn act(&mut self, epoch: u64, victim: &Victim) {
        if !self.is_victim(victim) {
            return;
        }
        let (pod, act) = (&victim.pod, self.act_on(&victim.pod));
        let text = victim.told();
        if pod.asked_back.is_none_or(|done| done < act) {
            let mut version = pod.resource_version.to_string();
            for step in [Act::Event, act] {
                if step != Act::Event && self.app.epoch.confirm(epoch).await.is_err() {
                    return;
                }
                let says = condition(names::GIVE_BACK, "True", step.reason(), &text);
                match self.write(pod, Some(&version), says).await {
                    Ok(now) => version = now,
                    Err(error) => return self.failed(victim, act, &error),
                }
                if step == act {
                    break;
                }
            }
            self.told.insert(pod.uid.clone());
            self.say(victim, act, &text);
            if act != Act::Evict {
                self.count(act, "done");
                return;
            }
            self.evict(epoch, victim, version).await;
        } else {
            let version = pod.resource_version.to_string();
            self.evict(epoch, victim, version).await;
        }
    }

    /// Evicts this very copy of the pod.
    async fn evict(&mut self, epoch: u64, victim: &Victim, version: String) {
        let pod = &victim.pod;
        if self.app.epoch.confirm(epoch).await.is_err() || !self.is_victim(victim) {
            return;
        }
        match self.ask_to_evict(pod, version).await {
            Ok(()) => {
                self.evicted.insert(pod.uid.clone());
                self.refused.remove(&pod.uid);
                self.count(Act::Evict, "done");
                tracing::warn!(namespace = %pod.namespace, pod = %pod.name, "evicted");
            }
            // It has changed, or is gone: the next look knows it.
            Err(error) if is_settled(&error) => {}
            Err(error) => self.failed(victim, Act::Evict, &error),
        }
    }

    async fn ask_to_evict(&self, pod: &PodFacts, version: String) -> Result<(), AskError> {
        // kube's own request misspells the preconditions, and the API server drops what it does not know.
        let eviction = Eviction {
            metadata: ObjectMeta {
                name: Some(pod.name.to_string()),
                ..ObjectMeta::default()
            },
            delete_options: Some(DeleteOptions {
                preconditions: Some(Preconditions {
                    resource_version: Some(version),
                    uid: Some(pod.uid.to_string()),
                }),
                ..DeleteOptions::default()
            }),
        };
        let (pods, params) = (self.pods(pod), PostParams::default());
        let post = pods.create_subresource::<_, Value>("eviction", &pod.name, &params, &eviction);
        within(TIMEOUT, post).await.map(drop)
    }

    /// An act was refused or failed; an eviction is tried again after a pause.
    fn failed(&mut self, victim: &Victim, act: Act, error: &AskError) {
        let pod = &victim.pod;
        if is_settled(error) {
            return;
        }
        let by_budget = act == Act::Evict && error.status() == Some(429);
        self.count(act, if by_budget { "refused" } else { "failed" });
        tracing::warn!(
            namespace = %pod.namespace, pod = %pod.name, act = act.reason(), %error,
            "cannot have the pod give memory back; it is tried again"
        );
        if act != Act::Evict {
            return;
        }
        let pause = self
            .refused
            .get(&pod.uid)
            .map_or(PAUSE, |(_, pause)| *pause);
        let wait = pause.max(error.retry_after().min(MAX_PAUSE));
        let next = (pause * 2).min(MAX_PAUSE);
        self.refused
            .insert(pod.uid.clone(), (Instant::now() + wait, next));
        let note = format!(
            "{} is to be evicted for {}, and the API server refuses: {error}. It is tried again",
            name(pod),
            victim.whom
        );
        for pod in [Some(pod), victim.whom.pod()].into_iter().flatten() {
            self.app.events.not_evicted(pod, note.clone());
        }
    }

    /// Tells everybody.
    fn say(&self, victim: &Victim, act: Act, text: &str) {
        let pod = &victim.pod;
        tracing::warn!(
            namespace = %pod.namespace, pod = %pod.name, node = %victim.node, act = act.reason(),
            whom = %victim.whom, text, "a pod is to give GPU memory back"
        );
        let then = match act {
            Act::Event => "It is left alone otherwise",
            Act::KillProcess => "Its processes on the GPU are ended until it is within its request",
            Act::Evict => "It is evicted",
        };
        self.app.events.gives_back(pod, format!("{text}. {then}"));
        if let Whom::Neighbour(whom) = &victim.whom {
            let note = format!(
                "{} uses memory that this pod asked for on {}, and is to give it back",
                name(pod),
                victim.gpus()
            );
            self.app.events.is_short(whom, note);
        }
    }

    fn count(&self, act: Act, outcome: &str) {
        self.count_as(act.into(), outcome);
    }

    fn count_as(&self, act: &str, outcome: &str) {
        self.app
            .metrics
            .acts
            .with_label_values(&[act, outcome])
            .inc();
    }
}

fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
