//! The free resources of every host while a workload is replayed, and the legal placements there. The replay keeps
//! these books itself and holds every policy to them.

/// A set of card models by number, one bit each.
pub type Models = u64;

/// One host.
#[derive(Clone, Debug)]
pub struct Host {
    /// Free CPU in thousandths of a core.
    pub cpu: u64,
    /// Free host memory in MiB.
    pub ram: u64,
    /// The model of its cards, as the only bit set.
    pub model: Models,
    /// The size of each card in units (MiB, or thousandths).
    pub card: u64,
    /// The free units of each card.
    pub left: Vec<u64>,
}

/// The demand of one pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Pods with equal wishes have equal numbers, counted from zero.
    pub class: usize,
    /// CPU in thousandths of a core.
    pub cpu: u64,
    /// Host memory in MiB.
    pub ram: u64,
    /// Cards.
    pub gpus: usize,
    /// Thousandths of each card, as the trace has it.
    pub milli: u64,
    /// Units on each card; for whole cards the least size.
    pub units: u64,
    /// Where it may run.
    pub models: Models,
}

impl Job {
    /// True if it takes whole cards.
    #[must_use]
    pub fn whole(&self) -> bool {
        self.gpus > 0 && self.milli == 1000
    }

    /// Thousandths of cards in all.
    #[must_use]
    pub fn demand(&self) -> u64 {
        self.gpus as u64 * self.milli
    }
}

impl Host {
    /// The checks of kube-scheduler's in-tree filters: CPU, host memory, node affinity.
    #[must_use]
    pub fn admits(&self, job: &Job) -> bool {
        self.cpu >= job.cpu && self.ram >= job.ram && self.model & job.models != 0
    }

    /// True if no pod holds a part of its cards.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.left.iter().all(|&left| left == self.card)
    }

    /// True if the card may take its part of the job.
    #[must_use]
    pub fn card_fits(&self, card: usize, job: &Job) -> bool {
        let left = self.left[card];
        left >= job.units && (!job.whole() || left == self.card)
    }

    /// True if the job fits.
    #[must_use]
    pub fn fits(&self, job: &Job) -> bool {
        let fitting = || (0..self.left.len()).filter(|&card| self.card_fits(card, job));
        self.admits(job) && (job.gpus == 0 || fitting().nth(job.gpus - 1).is_some())
    }

    /// Units that the job is charged on each card.
    #[must_use]
    pub fn charge(&self, job: &Job) -> u64 {
        if job.whole() { self.card } else { job.units }
    }

    /// The cards that most policies take: the tightest for a share, the first free ones for
    /// whole cards.
    #[must_use]
    pub fn usual_cards(&self, job: &Job) -> Vec<usize> {
        let mut cards: Vec<usize> = (0..self.left.len())
            .filter(|&card| self.card_fits(card, job))
            .collect();
        cards.sort_by_key(|&card| self.left[card]);
        cards.truncate(job.gpus);
        cards
    }

    /// Books a placement; false, and nothing is booked, if it is not legal.
    pub fn take(&mut self, job: &Job, cards: &[usize]) -> bool {
        let legal = |(at, &card): (usize, &usize)| {
            card < self.left.len() && self.card_fits(card, job) && !cards[..at].contains(&card)
        };
        if !self.admits(job) || cards.len() != job.gpus || !cards.iter().enumerate().all(legal) {
            return false;
        }
        let charge = self.charge(job);
        cards.iter().for_each(|&card| self.left[card] -= charge);
        self.cpu -= job.cpu;
        self.ram -= job.ram;
        true
    }

    /// Undoes [`Host::take`].
    pub fn give_back(&mut self, job: &Job, cards: &[usize]) {
        let charge = self.charge(job);
        cards.iter().for_each(|&card| self.left[card] += charge);
        self.cpu += job.cpu;
        self.ram += job.ram;
    }
}
